"""Adds the length of the prompt to the error for a prompt that does not fit into the context, as llama-server does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

from llamaq.common.errors import ErrorCode, JobFailed, LlamaqError
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.text_commands import TextAction
from llamaq.gateway.context import Context
from llamaq.gateway.generation import Generation
from llamaq.gateway.http.errors import RequestRefused
from llamaq.producer import AsyncClient
from llamaq.producer.queries import text_commands

ASK_TIMEOUT_S = 5.0


@asynccontextmanager
async def explaining_long_prompts(context: Context, generation: Generation) -> AsyncIterator[None]:
    """Replace the error of a prompt that is too long by an error with the fields `n_prompt_tokens` and `n_ctx`.

    Raises:
        RequestRefused: The prompt is too long.
    """
    try:
        yield
    except JobFailed as exc:
        if exc.code != ErrorCode.PROMPT_TOO_LONG:
            raise
        card = await context.queues.card(generation.client.queue)
        n_tokens = 0
        with suppress(LlamaqError):  # the error of the job says enough
            n_tokens = await _longest_prompt(generation.client, generation.requests)
        if card is None or not n_tokens:
            raise
        raise RequestRefused(
            HTTPStatus.BAD_REQUEST,
            f"the request exceeds the available context size: the prompt has {n_tokens} tokens, and prompt and answer "
            f"together can have {card.context_limit}",
            code=exc.code,
            details={"n_prompt_tokens": n_tokens, "n_ctx": card.context_limit},
        ) from exc


async def _longest_prompt(client: AsyncClient, requests: Sequence[JobRequest]) -> int:
    """Return the number of tokens of the longest prompt. A worker counts them: the requests have texts."""
    return max([await _count(client, request) for request in requests])


async def _count(client: AsyncClient, request: JobRequest) -> int:
    if request.tokens is not None:
        return len(request.tokens)
    prompt = {"text": request.prompt or ""} if request.messages is None else chat_of(request)
    reply = await text_commands.ask(client.connection, TextAction.TOKENIZE, ASK_TIMEOUT_S, **prompt)
    return len(reply.tokens)


def chat_of(request: JobRequest) -> dict[str, Any]:
    """Return the chat of a request as arguments of a text command."""
    messages = [message.model_dump(exclude_none=True) for message in request.messages or ()]
    return {"messages": messages, **{name: getattr(request, name) for name in request.template_fields}}
