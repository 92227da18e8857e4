"""The field `__verbose` of an answer to a chat: the rendered prompt and the options of the job, for debugging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.text_commands import TextAction
from llamaq.gateway.context import Context
from llamaq.gateway.generation import Generation
from llamaq.gateway.native_format import final_object
from llamaq.gateway.prompt_too_long_error import chat_of
from llamaq.producer import AsyncClient, Result
from llamaq.producer.openai_format.request_body import read_flag
from llamaq.producer.queries import text_commands


async def verbose_fields(
    context: Context, fields: Mapping[str, Any], generation: Generation, result: Result, model: str
) -> dict[str, Any]:
    """Return the field `__verbose` if the body `fields` has `verbose`, or if the server's `log_level` is `debug`. It
    describes the first job and its `result`.
    """
    is_debug = context.settings.log_level == "debug"
    if not read_flag({"verbose": is_debug, **fields}, "verbose"):
        return {}
    request, client = generation.requests[0], generation.client
    card = await context.queues.card(client.queue)
    answer = final_object(result, 0, request=request, card=card, model=model, has_tokens=True)
    return {"__verbose": answer | {"prompt": await rendered_prompt(client, request)}}


async def rendered_prompt(client: AsyncClient, request: JobRequest) -> str:
    """Return the prompt of a job as the model reads it."""
    if request.tokens is not None:
        return await client.detokenize(list(request.tokens))
    if request.messages is None:
        return request.prompt or ""
    return (await text_commands.ask(client.connection, TextAction.APPLY_TEMPLATE, None, **chat_of(request))).text
