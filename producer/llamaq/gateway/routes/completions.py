"""POST /v1/chat/completions and /v1/completions: OpenAI's endpoints that generate text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.token_logprobs import TokenLogprobs
from llamaq.gateway.context import FINGERPRINT, context_of
from llamaq.gateway.generation import Generation
from llamaq.gateway.http.event_stream import DONE, Events, EventStream, data
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.permissions import generation_for, queue_for
from llamaq.gateway.token_pieces import TokenPieces
from llamaq.producer import AsyncClient, Result
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.logprobs import logprobs_object, tokens_of
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
            _events(generation, body, model, echoed, context.pieces),
            comment=generation.describe_wait,
            ping_s=context.settings.ping_s,
        )
    results = await generation.results()
    logprobs = [
        await _logprobs(body, client, context.pieces, result.tokens, result.logprobs)
        for result in results
        if result.logprobs is not None
    ]
    return json_response(_answer(body, results, model, echoed, logprobs))


async def _logprobs(
    body: GenerationBody,
    client: AsyncClient,
    known: TokenPieces,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    offset: int = 0,
) -> dict[str, Any]:
    """Return the object `logprobs` of some tokens, `offset` characters after the beginning of the text."""
    pieces = await known.of(client, tokens_of(tokens, logprobs))
    return logprobs_object(body.endpoint, tokens, logprobs, pieces, offset)


async def _read_echoed(client: AsyncClient, body: GenerationBody) -> list[str]:
    """Return the prompts as texts, if the answer begins with them."""
    if not body.is_echoed:
        return []
    return [job["prompt"] if "prompt" in job else await client.detokenize(job["tokens"]) for job in body.jobs]


def _answer(
    body: GenerationBody,
    results: Sequence[Result],
    model: str,
    echoed: Sequence[str],
    logprobs: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    created_s = int(time.time())
    answer = completion_object(
        body.endpoint, *results, model=model, created_s=created_s, n=body.n, echoed=echoed, logprobs=logprobs
    )
    return answer | {"system_fingerprint": FINGERPRINT, "timings": timings_object(results[0].stats)}


async def _events(
    generation: Generation, body: GenerationBody, model: str, echoed: Sequence[str], known: TokenPieces
) -> Events:
    """Yield the encoded chunks of a streamed answer."""
    answer_id = completion_id(body.endpoint, generation.streams[0].job.id)
    chunks = StreamChunks(body.endpoint, answer_id, model, int(time.time()), FINGERPRINT)
    n_chars: dict[int, int] = {}
    """Number of characters of the text of each choice so far."""
    results: dict[int, Result] = {}
    pieces = generation.pieces()
    try:
        async for index, piece in pieces:
            if index not in n_chars:
                n_chars[index] = 0
                if body.endpoint is Endpoint.CHAT:
                    yield data(chunks.first(index))
                elif echoed:
                    yield data(chunks.text(index, echoed[index]))
            if isinstance(piece, Result):
                results[index] = piece
                yield data(chunks.last(index, piece))
                continue
            logprobs = None
            if piece.logprobs:
                offset = n_chars[index]
                logprobs = await _logprobs(body, generation.client, known, piece.tokens, piece.logprobs, offset)
            n_chars[index] += len(piece.text)
            if piece.text or logprobs:
                yield data(chunks.text(index, piece.text, logprobs))
    finally:
        await pieces.aclose()
    if body.has_usage_chunk:
        yield data(chunks.usage([results[index] for index in sorted(results)], body.n))
    yield DONE
