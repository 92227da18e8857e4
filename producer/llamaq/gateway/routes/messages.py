"""POST /v1/messages: Anthropic's endpoint that answers a chat."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.text_commands import TextAction
from llamaq.gateway.context import context_of
from llamaq.gateway.generation import Generation
from llamaq.gateway.http.errors import message_error
from llamaq.gateway.http.event_stream import Events, EventStream, named
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.messages_format import (
    first_events,
    last_events,
    message_object,
    read_messages_body,
    read_prompt,
    text_event,
)
from llamaq.gateway.permissions import generation_for, queue_for
from llamaq.producer import Result
from llamaq.producer.openai_format.request_body import read_flag
from llamaq.producer.queries import text_commands


async def answer(request: Request) -> Response:
    """Answer a chat."""
    context = context_of(request)
    body = await read_object(request)
    values, model = read_messages_body(body), _model_of(body)
    client = await queue_for(request, model)
    generation = generation_for(request, client, [values])
    if read_flag(body, "stream"):
        await generation.start()
        return await EventStream.open(
            _events(generation, model),
            comment=generation.describe_wait,
            ping_s=context.settings.ping_s,
            format_error=lambda exc: _encode(message_error(exc)),
        )
    (result,) = await generation.results()
    return json_response(message_object(result, model))


async def count_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of a chat has."""
    body = await read_object(request)
    client = await queue_for(request, _model_of(body))
    reply = await text_commands.ask(client.connection, TextAction.TOKENIZE, None, **read_prompt(body))
    return json_response({"input_tokens": len(reply.tokens)})


def _model_of(body: dict[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str):
        raise InvalidRequest("model: the name of a model is required")
    return model


async def _events(generation: Generation, model: str) -> Events:
    pieces = generation.pieces()
    has_begun = False
    try:
        async for _, piece in pieces:
            if not has_begun:
                has_begun = True
                yield b"".join(map(_encode, first_events(generation.streams[0].job.id, model)))
            if isinstance(piece, Result):
                yield b"".join(map(_encode, last_events(piece)))
            elif piece.text:
                yield _encode(text_event(piece.text))
    finally:
        await pieces.aclose()


def _encode(event: dict[str, Any]) -> bytes:
    return named(event["type"], event)
