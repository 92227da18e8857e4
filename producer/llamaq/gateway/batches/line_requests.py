"""Turns the lines of a batch into rows of a bulk run. The request of a line is prepared as at its endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from llamaq.common.errors import InvalidRequest
from llamaq.gateway.batches.record import BatchEndpoint
from llamaq.gateway.http.errors import RequestRefused
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.prepared.completion import PreparedCompletion
from llamaq.gateway.prepared.embedding import PreparedEmbedding
from llamaq.gateway.prepared.response import PreparedResponse, read_history
from llamaq.gateway.responses.item_references import with_referenced_items
from llamaq.gateway.responses.record import ResponseStore
from llamaq.gateway.responses.request_body import read_response_body
from llamaq.producer import AsyncClient, Result
from llamaq.producer.bulk.input_row import Row, unread_row
from llamaq.producer.bulk.run_description import RunParameters
from llamaq.producer.openai_format.endpoints import Endpoint

AddUsage = Callable[[int, Mapping[str, Any]], None]


class PreparedRequest(Protocol):
    """A request whose jobs can be submitted."""

    @property
    def jobs(self) -> Sequence[dict[str, Any]]:
        """The arguments of `submit` for each job."""

    @property
    def n_choices(self) -> int:
        """Number of jobs for each prompt. The jobs of one prompt follow each other."""

    async def answer(self, results: Sequence[Result]) -> Any:
        """Return the body of the answer, or its JSON.

        Args:
            results: The result of each job.

        Raises:
            LlamaqError: The answer needs a worker, and none has replied; or the results do not fit the request.
        """


class LineRequests:
    """Reads the lines of one batch."""

    def __init__(
        self,
        endpoint: BatchEndpoint,
        models: ModelKnowledge,
        client: AsyncClient,
        responses: ResponseStore,
        owner: str | None,
        job_options: Mapping[str, Any],
        add_usage: AddUsage,
    ) -> None:
        """Prepare to read.

        Args:
            endpoint: The endpoint of all lines.
            models: What is known about the models.
            client: The client of the queue.
            responses: The stored responses, which a line may continue.
            owner: Name of the API key of the batch. None: the server requires none.
            job_options: The options that the model of the batch sets. Those of a line take precedence.
            add_usage: Called with the number and the `usage` of a line before the body of its answer is returned.
        """
        self._endpoint = endpoint
        self._models = models
        self._client = client
        self._responses = responses
        self._owner = owner
        self._job_options = job_options
        self._add_usage = add_usage

    def __repr__(self) -> str:
        return f"<LineRequests {self._endpoint} queue={self._client.queue}>"

    async def read(self, run: RunParameters, number: int, record: object) -> Row:
        """Return the row of a line. If the line is not a request, the row has the error.

        Args:
            run: The run of the batch.
            number: The number of the line.
            record: The decoded JSON of the line.

        Raises:
            LlamaqError: The line needs a worker, and none has replied.
        """
        row = unread_row(run, number, record)
        try:
            asked = await self._prepare(record)
        except (InvalidRequest, RequestRefused) as exc:
            row.error = exc
            return row
        row.jobs = [{**self._job_options, **job} for job in asked.jobs]
        row.n_choices, row.body_of = asked.n_choices, partial(self._answer, number, asked)
        return row

    async def _answer(self, number: int, asked: PreparedRequest, results: Sequence[Result]) -> Any:
        """Return the body of the answer to a line, or its JSON, after its usage was reported."""
        body = await asked.answer(results)
        usage = asked.usage(results) if isinstance(asked, PreparedEmbedding) else body["usage"]
        self._add_usage(number, usage)
        return body

    async def _prepare(self, record: object) -> PreparedRequest:
        fields = record.get("body") if isinstance(record, Mapping) else None
        if not isinstance(fields, Mapping):
            raise InvalidRequest("body: an object is required")
        match self._endpoint:
            case BatchEndpoint.EMBEDDINGS:
                if "input" not in fields:  # llama-server's field `content` asks for an answer without a usage
                    raise InvalidRequest("input: a text, token ids, or a list of these is required")
                return await PreparedEmbedding.read(self._models.queues, self._client, fields)
            case BatchEndpoint.RESPONSES:
                return await self._prepare_response(fields)
            case _:
                return await PreparedCompletion.read(self._models, self._client, Endpoint(self._endpoint), fields)

    async def _prepare_response(self, fields: Mapping[str, Any]) -> PreparedResponse:
        """Return the request of a line. Its response is stored only in the output of the batch."""
        referring = await with_referenced_items(fields, self._models, self._responses, self._owner)
        asked = read_response_body(referring)
        body = replace(asked, is_stored=False, is_background=False, shown=asked.shown | {"store": False})
        history = await read_history(self._responses, self._models.queues, body.previous_id, self._owner)
        return await PreparedResponse.read(self._models, self._client, body, history, self._owner)
