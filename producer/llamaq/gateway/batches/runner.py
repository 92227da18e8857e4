"""Runs batches in the background of a server, also batches of dead servers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import replace
from functools import partial

from redis.exceptions import RedisError, ResponseError

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import ProtocolError
from llamaq.common.redis.outage_log import OutageLog
from llamaq.common.redis.write_refusals import is_job_key_error
from llamaq.gateway.batches.batch_run import BatchRun, run_with_lease
from llamaq.gateway.batches.record import Batch, BatchStatus
from llamaq.gateway.batches.store import BatchStore, LeaseLost
from llamaq.gateway.keys.key_store import KeyStore
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.settings import ServeSettings

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Longest time until a server notices that a batch waits for a server, or is cancelled."""
RENEW_S = 1.0
RETRY_S = 5.0
"""A batch that could not be run is tried again after this time."""
LOOK_AT = 16
"""Number of waiting batches that a server examines, because other servers may have claimed the first of them."""


class BatchRunner:
    """The batches that this server runs."""

    def __init__(self, settings: ServeSettings, models: ModelKnowledge, keys: KeyStore) -> None:
        self._settings = settings
        self._models = replace(models, waits=False)  # a run writes an answer later that needs a worker
        self._api_keys = keys
        client = models.queues.default
        self.store = BatchStore(client.redis, client.keys)
        self._id = secrets.token_hex(8)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._has_work = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<BatchRunner {self._id} running={sorted(self._running)}>"

    def start(self) -> None:
        """Begin to look for batches."""
        if self._settings.max_batches:
            self._looking = asyncio.create_task(self._look())

    def wake(self) -> None:
        """Look now, because there is a new batch."""
        self._has_work.set()

    async def aclose(self) -> None:
        """Leave the batches to other servers, which continue them at once."""
        if self._looking is not None:
            await cancel_tasks(self._looking)
        await cancel_tasks(*self._running.values())

    async def _look(self) -> None:
        """Start the batches that wait for a server, until this task is cancelled."""
        wait_s = min(LOOK_S, self._settings.batch_lease_s / 3)
        outage = OutageLog(log, "batch")
        while True:
            self._has_work.clear()
            try:
                await self._start_due()
                outage.record_success()
            except (RedisError, OSError) as exc:
                outage.record_failure(exc)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_work.wait()

    async def _start_due(self) -> None:
        if not self._settings.max_batches:
            return
        for batch_id in await self.store.due(LOOK_AT, max(self._settings.batch_lease_s, RETRY_S)):
            is_full = len(self._running) >= self._settings.max_batches
            if batch_id in self._running or (is_full and await self._may_submit(batch_id)):
                continue
            claim = await self.store.claim(batch_id, self._id, self._settings.batch_lease_s)
            if claim.code == "mine":
                task = asyncio.create_task(self._run(batch_id))
                self._running[batch_id] = task
                task.add_done_callback(partial(self._forget, batch_id))

    async def _may_submit(self, batch_id: str) -> bool:
        """Return whether a batch may submit more jobs. Otherwise it has only to end, and needs no place."""
        try:
            batch = await self.store.read(batch_id)
        except (ProtocolError, ResponseError) as exc:  # its run finds the damage too, and closes it
            if isinstance(exc, ResponseError) and not is_job_key_error(exc):
                raise
            return False
        return batch is not None and _is_open(batch)

    def _forget(self, batch_id: str, _: asyncio.Task[None]) -> None:
        self._running.pop(batch_id, None)
        self._has_work.set()

    async def _run(self, batch_id: str) -> None:
        """Run a batch whose lease this server has, and release it if it has not ended."""
        try:
            if await self._run_to_end(batch_id):
                return
        except LeaseLost:
            log.warning("batch.lost id=%s: another server runs it", batch_id)
            return
        except ProtocolError as exc:
            log.error("batch.damaged id=%s error=%s", batch_id, exc)
            with suppress(RedisError, OSError):  # then it is claimed again, and found damaged again
                await self.store.close(batch_id)
            return
        except (RedisError, OSError) as exc:
            log.warning("batch.delayed id=%s error=%s", batch_id, exc)
        except asyncio.CancelledError:
            with suppress(RedisError, OSError):
                await self._release(batch_id, 0.0)
            raise
        with suppress(RedisError, OSError):
            await self._release(batch_id, RETRY_S)

    async def _run_to_end(self, batch_id: str) -> bool:
        """Run a batch. Return False if it has to wait for another batch of its API key."""
        await self._check_key(await self._read(batch_id))
        batch = await self._read(batch_id)  # it may be cancelled now
        needs_turn = _needs_turn(batch)
        if needs_turn and not await self._take_turn(batch):
            return False
        run = BatchRun(self.store, self._models, batch, self._id)

        async def renew() -> None:
            while True:
                await asyncio.sleep(min(RENEW_S, self._settings.batch_lease_s / 3))
                with suppress(RedisError, OSError):  # if the lease ends meanwhile, the next write fails
                    await self._renew(run, batch, has_turn=needs_turn)

        await run_with_lease(run, renew)
        if batch.request.key is not None:
            await self.store.release_turn(batch.request.key.name, batch_id)
        return True

    async def _read(self, batch_id: str) -> Batch:
        batch = await self.store.read(batch_id)
        if batch is None:
            raise LeaseLost(batch_id)
        return batch

    async def _check_key(self, batch: Batch) -> None:
        """Cancel a batch whose API key was revoked."""
        request = batch.request
        if request.key is not None and request.is_revocable and await self._api_keys.named(request.key.name) is None:
            await self.store.cancel(request.id)

    async def _take_turn(self, batch: Batch) -> bool:
        """Return whether no other batch of the API key runs. A call renews the right of this batch to run."""
        owner = batch.request.owner or ""
        return await self.store.take_turn(owner, batch.request.id, self._settings.batch_lease_s)

    async def _renew(self, run: BatchRun, batch: Batch, *, has_turn: bool) -> None:
        claim = await self.store.claim(batch.request.id, self._id, self._settings.batch_lease_s)
        if claim.code == "held":
            raise LeaseLost(batch.request.id)
        if claim.status == BatchStatus.CANCELLING:
            run.stop.set()
        await self._check_key(batch)
        if has_turn:
            await self._take_turn(batch)

    async def _release(self, batch_id: str, delay_s: float) -> None:
        await self.store.claim(batch_id, self._id, 0)
        await self.store.postpone(batch_id, delay_s)


def _needs_turn(batch: Batch) -> bool:
    """Return whether a batch, because its API key has limits, may run only while no other batch of the key runs."""
    key = batch.request.key
    has_limits = key is not None and (key.max_open is not None or key.requests_per_minute is not None)
    return has_limits and _is_open(batch)


def _is_open(batch: Batch) -> bool:
    """Return whether a batch may submit more jobs. Otherwise it has only to end, and needs no place and no turn."""
    return not batch.is_over and batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
