"""POST /completion: llama-server's own endpoint that generates text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.token_logprobs import TokenLogprobs
from llamaq.gateway.context import context_of
from llamaq.gateway.generation import Generation
from llamaq.gateway.http.event_stream import Events, EventStream, data
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.native_format import final_object, partial_object, read_native_body
from llamaq.gateway.permissions import generation_for, queue_for
from llamaq.gateway.token_pieces import TokenPieces
from llamaq.producer import Result
from llamaq.producer.openai_format.logprobs import token_object, tokens_of
from llamaq.producer.openai_format.request_body import GenerationBody, read_flag


async def complete(request: Request) -> Response:
    """Continue a text, or several."""
    context = context_of(request)
    fields = await read_object(request)
    body = read_native_body(fields)
    has_tokens = read_flag(fields, "return_tokens")
    client = await queue_for(request, body.model)
    generation = generation_for(request, client, body.jobs, is_kept=body.is_stored)
    model = body.model or client.queue
    if body.is_streamed:
        await generation.start()
        return await EventStream.open(
            _events(generation, body, model, context.pieces, has_tokens=has_tokens),
            comment=generation.describe_wait,
            ping_s=context.settings.ping_s,
        )
    answers = []
    for index, result in enumerate(await generation.results()):
        answer = final_object(
            result, index, values=body.jobs[index], model=model, is_streamed=False, has_tokens=has_tokens
        )
        logprobs = await _probabilities(generation, context.pieces, result.tokens, result.logprobs or ())
        answers.append(answer | logprobs)
    return json_response(answers[0] if len(answers) == 1 else answers)


async def _probabilities(
    generation: Generation, known: TokenPieces, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """Return the field `completion_probabilities` of some tokens, if the request asked for it."""
    if not logprobs:
        return {}
    pieces = await known.of(generation.client, tokens_of(tokens, logprobs))
    pairs = zip(tokens, logprobs, strict=True)
    return {"completion_probabilities": [token_object(token, each, pieces) for token, each in pairs]}


async def _events(
    generation: Generation, body: GenerationBody, model: str, known: TokenPieces, *, has_tokens: bool
) -> Events:
    pieces = generation.pieces()
    try:
        async for index, piece in pieces:
            if isinstance(piece, Result):
                values = body.jobs[index]
                yield data(
                    final_object(piece, index, values=values, model=model, is_streamed=True, has_tokens=has_tokens)
                )
            else:
                logprobs = await _probabilities(generation, known, piece.tokens, piece.logprobs)
                yield data(partial_object(index, piece.text, piece.tokens) | logprobs)
    finally:
        await pieces.aclose()
