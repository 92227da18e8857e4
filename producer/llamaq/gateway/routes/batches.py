"""/v1/batches: OpenAI's endpoints that compute the requests of a file."""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from llamaq.gateway.batches.record import Batch, BatchRequest, BatchStatus, batch_object
from llamaq.gateway.batches.request_body import asks_for_the_same, read_batch_request
from llamaq.gateway.context import context_of
from llamaq.gateway.files.record import UPLOAD_PURPOSE
from llamaq.gateway.http.errors import RequestRefused, invalid
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.http.query_parameters import page_fields, read_page
from llamaq.gateway.queue_of_request import IDEMPOTENCY_HEADER, api_key_of, idempotency_key_of, owner_of
from llamaq.gateway.routes.files import files_of

MAX_LISTED, LISTED = 100, 20
INPUT_MARGIN_S = 3600
"""How much longer the input file is stored than its batch may run."""


async def create(request: Request) -> Response:
    """Begin to compute the requests of a file. A repeated request with the same `Idempotency-Key` gets its batch."""
    context = context_of(request)
    body = await read_object(request)
    key = api_key_of(request)
    is_revocable = key is not None and await context.keys.named(key.name) is not None
    own_key = idempotency_key_of(request)
    asked = read_batch_request(body, context.settings, key, is_revocable=is_revocable, idempotency_key=own_key)
    if own_key is not None and (earlier := await context.batches.store.read(asked.id)) is not None:
        await _reopen(request, _same(earlier, asked))
        return json_response(batch_object(earlier))
    files = files_of(request)
    record = await files.find(asked.input_file_id, param="input_file_id")
    if record.purpose != UPLOAD_PURPOSE:
        raise invalid("input_file_id: a file with the purpose 'batch' is required", "input_file_id")
    await files.keep_until(record, asked.expires_s + INPUT_MARGIN_S)
    batch = await context.batches.store.create(asked)
    context.batches.wake()
    return json_response(batch_object(_same(batch, asked)))


def _same(batch: Batch, asked: BatchRequest) -> Batch:
    """Return the batch with the id of a request.

    Raises:
        RequestRefused: Another request has begun it.
    """
    if not asks_for_the_same(batch.request, asked):
        raise RequestRefused(
            HTTPStatus.CONFLICT,
            f"the batch {asked.id} has the same {IDEMPOTENCY_HEADER} and another request: use another key for another "
            "request",
            code="idempotency_conflict",
        )
    return batch


async def retrieve(request: Request) -> Response:
    """Return a batch as it is now."""
    batch = await _find(request)
    await _reopen(request, batch)
    return json_response(batch_object(batch))


async def list_batches(request: Request) -> Response:
    """Return the batches of the API key, the newest first unless `order=asc`."""
    page = read_page(request, most=MAX_LISTED, default=LISTED)
    store = context_of(request).batches.store
    batches, has_more = await store.listed(owner_of(request), page)
    shown = [batch_object(batch) for batch in batches]
    return json_response({"object": "list", **page_fields(shown, has_more=has_more)})


async def cancel(request: Request) -> Response:
    """Cancel a batch. The answers that it has until then can be read."""
    batch = await _find(request)
    if batch.status.has_ended and batch.status is not BatchStatus.CANCELLED:
        raise invalid(f"the batch is {batch.status}: it cannot be cancelled any more")
    await context_of(request).batches.store.cancel(batch.request.id)
    return json_response(batch_object(await _find(request)))


async def _reopen(request: Request, batch: Batch) -> None:
    """Let a server run a batch that no server knows of: the server that began it was killed too early."""
    if await context_of(request).batches.store.reopen(batch):
        context_of(request).batches.wake()


async def _find(request: Request) -> Batch:
    return await context_of(request).batches.store.find(request.path_params["batch"], owner_of(request))
