"""POST /v1/messages: Anthropic's endpoint that answers a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.errors import LlamaqError
from llamaq.common.protocol.text_commands import TextAction
from llamaq.gateway.context import Context, context_of
from llamaq.gateway.generation import Generation
from llamaq.gateway.http.errors import message_error
from llamaq.gateway.http.event_stream import Events, EventStream, named
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.messages.answer_blocks import AnswerBlocks
from llamaq.gateway.messages.request_body import read_messages_body
from llamaq.gateway.prompt_too_long_error import as_anthropic, explaining_long_prompts
from llamaq.gateway.queue_of_request import generation_for, model_for, queue_for
from llamaq.producer import AsyncClient, Result
from llamaq.producer.answer_parts.answer_format import AnswerForm
from llamaq.producer.openai_format.tools import form_options
from llamaq.producer.queries import text_commands

COUNT_TIMEOUT_S = 1.0
"""A stream does not wait longer for the number of its input tokens."""


async def answer(request: Request) -> Response:
    """Answer a chat."""
    context = context_of(request)
    body = read_messages_body(await read_object(request))
    model = await model_for(request, body.model)
    values = {**body.prompt, **body.options}
    form = await context.models.forms.of(model.client.connection, values, is_parallel=body.tool_choice.is_parallel)
    generation = generation_for(request, model, [values | form_options(form, body.tool_choice, values)])
    if body.is_streamed:
        n_input = await _count_input(model.client, body.prompt)
        await generation.start()
        return await EventStream.open(
            _events(context, generation, form, body.model, n_input),
            comment=generation.describe_wait,
            ping_s=context.settings.ping_s,
            format_error=lambda exc: _encode([message_error(exc, request.state.request_id)]),
        )
    async with explaining_long_prompts(context, generation, as_anthropic):
        (result,) = await generation.results()
    return json_response(AnswerBlocks(result.job_id, form, body.model).whole(result))


async def count_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of a chat has."""
    body = read_messages_body(await read_object(request))
    client = await queue_for(request, body.model)
    reply = await text_commands.ask(client.connection, TextAction.TOKENIZE, None, **body.prompt)
    return json_response({"input_tokens": len(reply.tokens)})


async def _count_input(client: AsyncClient, prompt: Mapping[str, Any]) -> int:
    """Return how many tokens a prompt has. 0: no worker has answered in time; the last event has the number too."""
    try:
        reply = await text_commands.ask(client.connection, TextAction.TOKENIZE, COUNT_TIMEOUT_S, **prompt)
    except LlamaqError:
        return 0
    return len(reply.tokens)


async def _events(context: Context, generation: Generation, form: AnswerForm, model: str, n_input: int) -> Events:
    blocks = AnswerBlocks(generation.streams[0].job.id, form, model)
    begun: list[dict[str, Any]] = [blocks.first(n_input)]
    explaining = explaining_long_prompts(context, generation, as_anthropic)
    async with explaining, aclosing(generation.pieces()) as pieces:
        async for _, piece in pieces:
            events = blocks.finish(piece) if isinstance(piece, Result) else blocks.feed(piece)
            if encoded := _encode([*begun, *events]):
                yield encoded
            begun = []


def _encode(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(named(event["type"], event) for event in events)
