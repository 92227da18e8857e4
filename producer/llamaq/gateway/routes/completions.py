"""POST /v1/chat/completions and /v1/completions: OpenAI's endpoints that generate text."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from llamaq.gateway.context import FINGERPRINT, context_of
from llamaq.gateway.generation import Generation
from llamaq.gateway.http.event_stream import DONE, Events, EventStream, data
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.permissions import generation_for, queue_for
from llamaq.producer import AsyncClient, Result
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.request_body import GenerationBody, read_body
from llamaq.producer.openai_format.response_body import completion_id, completion_object, timings_object
from llamaq.producer.openai_format.stream_chunks import StreamChunks


async def chat(request: Request) -> Response:
    """Answer a chat."""
    return await _generate(request, Endpoint.CHAT)


async def complete(request: Request) -> Response:
    """Continue a text."""
    return await _generate(request, Endpoint.COMPLETIONS)


async def _generate(request: Request, endpoint: Endpoint) -> Response:
    context = context_of(request)
    body = read_body(endpoint, await read_object(request))
    client = await queue_for(request, body.model, is_kept=body.is_stored)
    echoed = await _read_echoed(client, body)
    generation = generation_for(request, client, body.jobs, is_kept=body.is_stored)
    model = body.model or client.queue
    if body.is_streamed:
        await generation.start()
        return await EventStream.open(
            _events(generation, body, model, echoed),
            comment=generation.describe_wait,
            ping_s=context.settings.ping_s,
        )
    return json_response(_answer(body, await generation.results(), model, echoed))


async def _read_echoed(client: AsyncClient, body: GenerationBody) -> list[str]:
    """Return the prompts as texts, if the answer begins with them."""
    if not body.is_echoed:
        return []
    return [job["prompt"] if "prompt" in job else await client.detokenize(job["tokens"]) for job in body.jobs]


def _answer(body: GenerationBody, results: Sequence[Result], model: str, echoed: Sequence[str]) -> dict[str, object]:
    created_s = int(time.time())
    answer = completion_object(body.endpoint, *results, model=model, created_s=created_s, n=body.n, echoed=echoed)
    return answer | {"system_fingerprint": FINGERPRINT, "timings": timings_object(results[0].stats)}


async def _events(generation: Generation, body: GenerationBody, model: str, echoed: Sequence[str]) -> Events:
    """Yield the encoded chunks of a streamed answer."""
    answer_id = completion_id(body.endpoint, generation.streams[0].job.id)
    chunks = StreamChunks(body.endpoint, answer_id, model, int(time.time()), FINGERPRINT)
    begun: set[int] = set()
    results: dict[int, Result] = {}
    pieces = generation.pieces()
    try:
        async for index, piece in pieces:
            if index not in begun:
                begun.add(index)
                if body.endpoint is Endpoint.CHAT:
                    yield data(chunks.first(index))
                elif echoed:
                    yield data(chunks.text(index, echoed[index]))
            if isinstance(piece, Result):
                results[index] = piece
                yield data(chunks.last(index, piece))
            elif piece.text:
                yield data(chunks.text(index, piece.text))
    finally:
        await pieces.aclose()
    if body.has_usage_chunk:
        yield data(chunks.usage([results[index] for index in sorted(results)], body.n))
    yield DONE
