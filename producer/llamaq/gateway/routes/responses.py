"""/v1/responses: OpenAI's endpoint for stored answers. Every server can read, resume and cancel every stored answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import JobFailed, JobNotFound, NoWorker, ResultTimeout
from llamaq.common.protocol.job_outcome import JobState, Result
from llamaq.gateway.context import context_of
from llamaq.gateway.generation import Generation, describe_wait
from llamaq.gateway.http.errors import error_fields, invalid
from llamaq.gateway.http.event_stream import FIRST_PING_S, Events, EventStream, named
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.http.query_parameters import page_of, read_page, read_query_flag
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.prepared.response import PreparedResponse, conversation_of, count_tokens, read_history
from llamaq.gateway.progress_fields import NO_PROGRESS, ProgressFields, ProgressOptions
from llamaq.gateway.prompt_too_long_error import explaining_long_prompts
from llamaq.gateway.queue_of_request import generation_for, model_for, owner_of, queue_for
from llamaq.gateway.responses.answer_reader import AnswerReader, read_response
from llamaq.gateway.responses.event_sequence import EventSequence
from llamaq.gateway.responses.input_items import input_items
from llamaq.gateway.responses.item_references import with_referenced_items
from llamaq.gateway.responses.record import ID_PREFIX, ResponseRecord, ResponseStore
from llamaq.gateway.responses.request_body import ResponseBody, read_response_body
from llamaq.gateway.responses.response_object import failed_response, open_response
from llamaq.producer import AsyncJob, Chunk

MAX_LISTED, LISTED = 100, 20
"""Number of items in a page of the input: the largest, and that of a request without `limit`."""

CANCEL_WAIT_S = 1.0
"""How long a cancel waits for the end of the job, which comes after the tick that runs. So a request that comes next
shows the same state."""

Pieces = AsyncGenerator[Chunk | Result, None]
"""The chunks of a job, and at last its result."""


async def create(request: Request) -> Response:
    """Answer a request, or begin to."""
    fields = await read_object(request)
    body, progress = await _read_body(request, fields), ProgressOptions.read(fields)
    models, owner = context_of(request).models, owner_of(request)
    history = await read_history(_store_of(request), models.queues, body.previous_id, owner)
    model = await model_for(request, body.model, is_stored=body.is_stored)
    asked = await PreparedResponse.read(models, model.client, body, history, owner)
    is_kept = body.is_stored and (body.is_streamed or body.is_background)
    generation = generation_for(request, model, asked.jobs, is_kept=is_kept, is_background=body.is_background)
    async with explaining_long_prompts(context_of(request), generation):
        return await _answer(request, body, progress, asked, generation)


async def _answer(
    request: Request, body: ResponseBody, progress: ProgressOptions, asked: PreparedResponse, generation: Generation
) -> Response:
    """Submit the job of a request, and return the response, or its beginning."""
    max_bytes = generation.client.settings.max_request_bytes
    record = asked.record.model_copy(update={"idempotency_key": generation.key_of_job(0)})
    encoded = record.encode(max_bytes) if body.is_stored else ""
    store = _store_of(request)
    await generation.start(stream=body.is_streamed or body.is_background)
    try:
        job = generation.streams[0].job
        if body.is_stored:
            await store.save(job.id, encoded, generation.requests[0])
        if body.is_streamed:
            # A client of a background response wants its id at once.
            wait_s = 0.0 if body.is_background else FIRST_PING_S
            pieces = _pieces_of(generation, is_background=body.is_background)
            if body.is_stored:
                pieces = _expiring(pieces, store, job.id)
            events = await _stream(request, job, asked.record, pieces, progress=progress, first_wait_s=wait_s)
            generation.keep()
            return events
        if body.is_background:
            response = json_response(await _current(request, asked.record, job))
            generation.keep()
            await generation.aclose()
            return response
        async for _, piece in generation.pieces():
            if isinstance(piece, Result):
                if body.is_stored:
                    await store.expire_with_result(job.id)
                return json_response(await asked.answer([piece]))
        raise JobNotFound(job.id)
    except BaseException:
        await generation.aclose()
        can_be_found = body.is_background or generation.key_of_job(0) is not None
        if body.is_stored and not can_be_found:  # no client has the id
            with suppress(RedisError, OSError):
                await store.delete(job.id)
        raise


async def retrieve(request: Request) -> Response:
    """Return a response as it is now, or with `stream=true` its events from `starting_after` on."""
    record, job = await _find(request)
    if read_query_flag(request, "stream"):
        pieces = _expiring(_pieces_from(job), _store_of(request), job.id)
        is_running = (await job.status()).state in (JobState.QUEUED, JobState.RUNNING)
        models = replace(context_of(request).models, waits=is_running)
        return await _stream(request, job, record, pieces, _starting_after(request), models=models)
    return json_response(await _current(request, record, job))


async def cancel(request: Request) -> Response:
    """Cancel a response."""
    record, job = await _find(request)
    await _cancel(job)
    response = await _current(request, record, job)
    # If the tick takes longer, the job will be cancelled after it.
    return json_response(response if response["usage"] or response["error"] else response | {"status": "cancelled"})


async def _cancel(job: AsyncJob) -> bool:
    """Cancel a job, and return whether it has ended."""
    await job.cancel()
    with suppress(JobFailed):  # the response shows a failure
        try:
            await job.result(timeout=CANCEL_WAIT_S)
        except (NoWorker, ResultTimeout):
            return False
    return True


async def delete(request: Request) -> Response:
    """Remove a response. If its job has not ended, it is cancelled."""
    record, job = await _find(request)
    store, has_result = _store_of(request), False
    with suppress(JobNotFound):
        has_result = await _cancel(job)
    if has_result:
        await store.delete_with_result(job.id, record)
    else:
        await store.delete(job.id)
    return json_response({"id": ID_PREFIX + job.id, "object": "response", "deleted": True})


async def list_input_items(request: Request) -> Response:
    """Return a page of the messages that came with the request of a response."""
    page = read_page(request, most=MAX_LISTED, default=LISTED)
    record, job = await _find(request)
    return json_response(page_of(input_items(job.id, record), page))


async def count_input_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of a response would have."""
    body = await _read_body(request, await read_object(request))
    queues = context_of(request).queues
    history = await read_history(_store_of(request), queues, body.previous_id, owner_of(request))
    client = await queue_for(request, body.model)
    n_tokens = await count_tokens(client, body, conversation_of(body, history))
    return json_response({"object": "response.input_tokens", "input_tokens": n_tokens})


async def _read_body(request: Request, fields: Mapping[str, Any]) -> ResponseBody:
    """Return what the body of a request asks for, with the stored items that it refers to."""
    models, owner = context_of(request).models, owner_of(request)
    return read_response_body(await with_referenced_items(fields, models, _store_of(request), owner))


def _store_of(request: Request) -> ResponseStore:
    context = context_of(request)
    client = context.queues.default
    return ResponseStore(client.redis, client.keys, context.settings.response_ttl_s)


async def _find(request: Request) -> tuple[ResponseRecord, AsyncJob]:
    """Return the record and the job of the response that the path names."""
    job_id, record = await _store_of(request).read(request.path_params["response"], owner_of(request))
    return record, context_of(request).queues.default.job(job_id)


async def _current(request: Request, record: ResponseRecord, job: AsyncJob) -> dict[str, Any]:
    """Return the response as it is now. Its answer is stored, so it is not worth a wait for a worker."""
    status = await job.status()
    if status.state in (JobState.QUEUED, JobState.RUNNING):
        return open_response(job.id, record, status.state)
    await _store_of(request).expire_with_result(job.id)
    try:
        models = replace(context_of(request).models, waits=False)
        return await read_response(models, job.id, record, await job.result())
    except JobFailed as exc:
        return failed_response(job.id, record, exc)


def _starting_after(request: Request) -> int:
    value = request.query_params.get("starting_after", "-1")
    if not value.removeprefix("-").isdecimal() or len(value) > 18:
        raise invalid("starting_after: a number is required", "starting_after")
    return int(value)


async def _pieces_of(generation: Generation, *, is_background: bool) -> Pieces:
    """Yield the pieces of the only job of a request. If the job belongs to the request alone, it ends with
    this generator.

    Raises:
        JobCancelled: The job was cancelled. Only a response in the background shows this instead.
    """
    pieces = generation.all_pieces() if is_background else generation.pieces()
    try:
        async for _, piece in pieces:
            yield piece
    finally:
        await pieces.aclose()


async def _pieces_from(job: AsyncJob) -> Pieces:
    """Yield the pieces of a stored job from its first one on."""
    chunks = job.stream()
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        await chunks.aclose()
    yield await job.result()


async def _expiring(pieces: Pieces, store: ResponseStore, job_id: str) -> Pieces:
    """Yield the pieces of a stored response. At the end of its job, the record gets the expiry of the result."""
    try:
        async for piece in pieces:
            if isinstance(piece, Result):
                await store.expire_with_result(job_id)
            yield piece
    except JobFailed:
        await store.expire_with_result(job_id)
        raise
    finally:
        await pieces.aclose()


async def _stream(
    request: Request,
    job: AsyncJob,
    record: ResponseRecord,
    pieces: Pieces,
    starting_after: int = -1,
    progress: ProgressOptions = NO_PROGRESS,
    first_wait_s: float = 0.0,
    models: ModelKnowledge | None = None,
) -> Response:
    """Return the events of a response after the number `starting_after`, from the `pieces` of its job.

    The first events wait for the first piece, at most `first_wait_s` seconds. An error in this time sets the status.

    Raises:
        JobFailed: The job has failed before the first events.
    """
    sequence = EventSequence(job.id, record, starting_after)
    ping_s = context_of(request).settings.ping_s

    def format_error(exc: Exception) -> bytes:
        # A resumed stream does not repeat the error. So it takes no number of its own.
        return _encode({**error_fields(exc), "type": "error", "sequence_number": sequence.last_sent})

    reader = AnswerReader(models or context_of(request).models, job.id, record)
    return await EventStream.open(
        _events(sequence, reader, pieces, ProgressFields(progress), min(first_wait_s, ping_s)),
        comment=partial(describe_wait, job),
        ping_s=ping_s,
        format_error=format_error,
    )


async def _events(
    sequence: EventSequence, reader: AnswerReader, pieces: Pieces, progress: ProgressFields, first_wait_s: float
) -> Events:
    begun = _begun(pieces, first_wait_s)
    try:
        async for piece in begun:
            for event in await _events_of(sequence, reader, piece, progress):
                sequence.last_sent = event["sequence_number"]
                yield _encode(event)
    except JobFailed as exc:
        if sequence.last_number < 0:  # there was no event, so the error still has a status
            raise
        for event in sequence.failure(exc):
            sequence.last_sent = event["sequence_number"]
            yield _encode(event)
    finally:
        await begun.aclose()


async def _begun(pieces: Pieces, wait_s: float) -> AsyncGenerator[Chunk | Result | None, None]:
    """Yield None when the first piece has arrived, or after `wait_s` seconds. Then yield the pieces."""
    first = asyncio.ensure_future(anext(pieces))
    try:
        if wait_s:
            await asyncio.wait([first], timeout=wait_s)
        if first.done():
            first.result()
        yield None
        yield await first
        async for piece in pieces:
            yield piece
    finally:
        await cancel_tasks(first)
        await pieces.aclose()


async def _events_of(
    sequence: EventSequence, reader: AnswerReader, piece: Chunk | Result | None, progress: ProgressFields
) -> list[dict[str, Any]]:
    """Return the events for the next piece. None: the events before the first piece."""
    if piece is None:
        return list(sequence.first())
    fields = progress.of(piece) if isinstance(piece, Chunk) else {}
    if fields is None:
        return []
    if "prompt_progress" in fields:
        return [sequence.progress(fields)]
    events = [event for each in await reader.read(piece) for event in sequence.text(*each, fields)]
    if isinstance(piece, Result):
        events += sequence.end(piece, await reader.count_reasoning(piece))
    return events


def _encode(event: dict[str, Any]) -> bytes:
    return named(event["type"], event)
