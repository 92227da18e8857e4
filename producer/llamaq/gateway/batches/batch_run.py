"""Runs one batch on this server to its end. It may continue a batch that another server has begun."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from redis.exceptions import RedisError

from llamaq.common.errors import BulkRunRefused, InvalidSettings
from llamaq.common.protocol.embedding_task import JobKind, Pooling
from llamaq.common.protocol.queue_and_worker_state import WorkerCard
from llamaq.gateway.batches.finish_output_files import finish_files, write_unfinished
from llamaq.gateway.batches.input_check import check_input
from llamaq.gateway.batches.line_requests import AddUsage, LineRequests
from llamaq.gateway.batches.record import Batch, BatchEndpoint, BatchStatus
from llamaq.gateway.batches.redis_row_store import RedisRowStore
from llamaq.gateway.batches.store import BatchStore, LeaseLost
from llamaq.gateway.files.blocks import read_blocks
from llamaq.gateway.generation import with_max_tokens
from llamaq.gateway.http.errors import RequestRefused, code_of, message_of
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.model_names import NamedModel
from llamaq.gateway.responses.record import ResponseStore
from llamaq.producer import AsyncClient
from llamaq.producer.bulk import BulkState
from llamaq.producer.bulk.execution import Execution
from llamaq.producer.bulk.orphaned_job_cancellation import cancel_rows_in_flight
from llamaq.producer.bulk.run_description import RunParameters

log = logging.getLogger(__name__)

MAX_STARTS = 20
"""A batch fails after this number of servers have begun it without storing a row, because it may have crashed them."""
ENDS = {
    BulkState.COMPLETED: BatchStatus.COMPLETED,
    BulkState.STOPPED: BatchStatus.CANCELLED,
    BulkState.DEADLINE: BatchStatus.EXPIRED,
}


class BatchFailed(Exception):
    """The batch cannot be computed. The arguments are the errors that the batch shows."""

    def __init__(self, *errors: dict[str, Any]) -> None:
        super().__init__(*errors)
        self.errors = errors


def failure(code: str, message: str) -> BatchFailed:
    """Return the exception for a batch that fails for one reason."""
    return BatchFailed({"code": code, "message": message, "line": None, "param": None})


def check_kind(card: WorkerCard | None, endpoint: BatchEndpoint) -> None:
    """Check that the workers of a queue compute what the lines of a batch ask for.

    Args:
        card: The card of a worker. None: no live worker serves the queue; then each line is checked at its submit.
        endpoint: The endpoint of the lines.

    Raises:
        BatchFailed: The workers run jobs of another kind.
    """
    if card is None:
        return
    if card.kind is not endpoint.kind:
        raise failure(
            "wrong_model", f"model: the workers of {card.queue!r} run {card.kind} jobs, not {endpoint.kind} jobs"
        )
    if endpoint is BatchEndpoint.EMBEDDINGS and card.pooling is Pooling.NONE:
        raise failure("wrong_model", f"model: the workers of {card.queue!r} do not pool (--pooling none)")


class BatchRun:
    """One batch whose lease this server has."""

    def __init__(self, store: BatchStore, models: ModelKnowledge, batch: Batch, runner: str) -> None:
        """Prepare the run.

        Args:
            store: The batches.
            models: What is known about the models of the queues.
            batch: The batch.
            runner: The id of this server.
        """
        self._store = store
        self._models = models
        self._queues = models.queues
        self._batch = batch
        self._request = batch.request
        self._key = batch.request.key
        self._runner = runner
        self._run_id = batch.request.id.removeprefix("batch_")
        self.stop = asyncio.Event()
        """Set when the batch must be cancelled."""

    def __repr__(self) -> str:
        return f"<BatchRun {self._request.id} {self._batch.status}>"

    async def run(self) -> None:
        """Run the batch to its end.

        Raises:
            LeaseLost: Another server runs the batch.
            RedisError: Redis refuses the commands.
        """
        try:
            if self._batch.number("starts") > MAX_STARTS:
                raise failure("server_error", f"{MAX_STARTS} servers have ended while they computed this batch")
            await self._end(await self._compute())
        except BatchFailed as exc:
            await self._end(BatchStatus.FAILED, errors=json.dumps(exc.errors))
        except (BulkRunRefused, InvalidSettings) as exc:
            await self._end(BatchStatus.FAILED, errors=json.dumps(failure("invalid_request", str(exc)).errors))
        except (LeaseLost, RedisError, OSError):
            raise
        except Exception:
            log.exception("batch.failed id=%s", self._request.id)
            reason = failure("server_error", "a defect of the server: its log has the details")
            await self._end(BatchStatus.FAILED, errors=json.dumps(reason.errors))

    async def _compute(self) -> BatchStatus:
        """Compute the rows that are not finished. Return how the batch ends."""
        if self._batch.status is BatchStatus.FINALIZING:  # an earlier server has computed all rows
            return BatchStatus(self._batch.fields["outcome"])
        if self._batch.status is BatchStatus.VALIDATING:
            try:
                await self._check()
            except BatchFailed:
                if not self._batch.is_over:
                    raise
                return BatchStatus.EXPIRED  # while it waited for its turn, its input or its model may have gone
        if self._batch.status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED
        client = await self._queues.client(self._batch.fields["queue"], waits=True)
        rows = await RedisRowStore.open(self._store, self._batch, self._runner)
        parameters = self._parameters()
        lines = self._line_requests(client, rows.add_usage)
        execution = Execution(parameters, client, rows, read=lines.read, decide=self._decide, keeps_jobs=True)
        end = ENDS[await execution.run_until_end(_ignore, self.stop)]
        if end is BatchStatus.EXPIRED:
            await write_unfinished(parameters, rows, 4 * client.settings.max_request_bytes)
        return end

    async def _check(self) -> None:
        """Check the input, and begin to compute.

        Raises:
            BatchFailed: The input has errors, or the queue may not be used.
        """
        blocks = read_blocks(self._store.redis, self._store.keys.http_file(self._request.input_file_id))
        max_line_bytes = 4 * self._queues.default.settings.max_request_bytes
        found = await check_input(blocks, self._request.endpoint, max_line_bytes)
        if found.errors:
            raise BatchFailed(*found.errors)
        named = await self._find(found.model or self._request.queue)
        check_kind(await self._queues.card(named.queue), self._request.endpoint)
        await self._store.advance(
            self._request,
            self._runner,
            BatchStatus.IN_PROGRESS,
            total=found.n_lines,
            last_line=found.last_line,
            queue=named.queue,
            model=found.model or named.queue,
            job_options=json.dumps(named.job_options),
        )
        self._batch = await self._reread()

    async def _reread(self) -> Batch:
        batch = await self._store.read(self._request.id)
        if batch is None:
            raise LeaseLost(self._request.id)
        return batch

    async def _find(self, model: str) -> NamedModel:
        """Return what the lines name by their `model`.

        Raises:
            BatchFailed: There is no such model, or the API key does not allow its queue.
        """
        try:
            return await self._queues.find_allowed(model, self._key)
        except RequestRefused as exc:
            raise failure(code_of(exc) or "invalid_request", message_of(exc)) from exc

    def _line_requests(self, client: AsyncClient, add_usage: AddUsage) -> LineRequests:
        responses = ResponseStore(self._store.redis, self._store.keys, self._queues.settings.response_ttl_s)
        job_options = json.loads(self._batch.fields.get("job_options", "{}"))  # older servers stored none
        return LineRequests(
            self._request.endpoint, self._models, client, responses, self._request.owner, job_options, add_usage
        )

    def _decide(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a job, given those of its line: as at the endpoint, with those of the API key."""
        if self._request.endpoint.kind is JobKind.GENERATION:
            options = with_max_tokens(options, self._request.max_tokens)
        return options if self._key is None else self._key.job_options(options)

    def _parameters(self) -> RunParameters:
        """Return the parameters of the run. The limits of an API key also apply to its batches."""
        per_minute = None if self._key is None else self._key.requests_per_minute
        return RunParameters(
            run_id=self._run_id,
            form="openai",
            window=None if self._key is None or self._key.max_open is None else min(self._key.max_open, 100_000),
            deadline=datetime.fromtimestamp(self._request.expires_s, UTC),
            rate=None if per_minute is None else per_minute / 60,
        )

    async def _cancel_jobs(self) -> None:
        """Cancel the jobs that are left in the queue. A server that was killed may have submitted them."""
        last_line = self._batch.number("last_line")
        if not last_line:  # nothing was submitted
            return
        client = await self._queues.client(self._batch.fields["queue"], waits=True)
        await cancel_rows_in_flight(client, self._run_id, last_line)

    async def _end(self, status: BatchStatus, **fields: str) -> None:
        """Show the files of the batch, and set its last status. Each step may be repeated by another server."""
        shown = BatchStatus.CANCELLING if status is BatchStatus.CANCELLED else BatchStatus.FINALIZING
        if status is not BatchStatus.FAILED:
            await self._store.advance(self._request, self._runner, shown, outcome=status.value)
        if status is not BatchStatus.COMPLETED:
            await self._cancel_jobs()
        file_fields = await finish_files(self._store, await self._reread())
        await self._store.advance(self._request, self._runner, status, **fields, **file_fields)
        await self._store.close(self._request.id)
        log.info("batch.ended id=%s status=%s", self._request.id, status)


def _ignore(_: object) -> None:
    """Do nothing with the progress: Redis counts the rows."""


async def run_with_lease(run: BatchRun, renew: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a batch while `renew` runs beside it. The error of `renew` ends the run."""
    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(renew())
            await run.run()
            renewing.cancel()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
