"""POST /completion: llama-server's own endpoint that generates text."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from llamaq.gateway.context import context_of
from llamaq.gateway.generation import Generation
from llamaq.gateway.http.event_stream import Events, EventStream, data
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.native_format import final_object, partial_object, read_native_body
from llamaq.gateway.permissions import generation_for, queue_for
from llamaq.producer import Result
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
            _events(generation, body, model, has_tokens=has_tokens),
            comment=generation.describe_wait,
            ping_s=context.settings.ping_s,
        )
    answers = [
        final_object(result, index, values=body.jobs[index], model=model, is_streamed=False, has_tokens=has_tokens)
        for index, result in enumerate(await generation.results())
    ]
    return json_response(answers[0] if len(answers) == 1 else answers)


async def _events(generation: Generation, body: GenerationBody, model: str, *, has_tokens: bool) -> Events:
    pieces = generation.pieces()
    try:
        async for index, piece in pieces:
            if isinstance(piece, Result):
                values = body.jobs[index]
                yield data(
                    final_object(piece, index, values=values, model=model, is_streamed=True, has_tokens=has_tokens)
                )
            else:
                yield data(partial_object(index, piece.text, piece.tokens))
    finally:
        await pieces.aclose()
