"""Writes the error for a prompt that does not fit into the context, as the clients of each API read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
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
from llamaq.producer.openai_format.response_body import CONTEXT_LENGTH_EXCEEDED
from llamaq.producer.queries import text_commands

ASK_TIMEOUT_S = 5.0

Explain = Callable[[int, int], RequestRefused]
"""Returns the error for a number of tokens and a context limit."""


def as_llama_server(n_tokens: int, n_ctx: int) -> RequestRefused:
    """Return the error of llama-server's own endpoints."""
    return _with_lengths(n_tokens, n_ctx, ErrorCode.PROMPT_TOO_LONG)


def as_openai(n_tokens: int, n_ctx: int) -> RequestRefused:
    """Return the error of OpenAI's endpoints. It has llama-server's fields too."""
    return _with_lengths(n_tokens, n_ctx, CONTEXT_LENGTH_EXCEEDED)


def as_anthropic(n_tokens: int, n_ctx: int) -> RequestRefused:
    """Return the error of Anthropic's endpoint. Its errors have no code, so clients compare the message."""
    message = f"prompt is too long: {n_tokens} tokens > {n_ctx} maximum"
    return RequestRefused(HTTPStatus.BAD_REQUEST, message, code=CONTEXT_LENGTH_EXCEEDED)


@asynccontextmanager
async def explaining_long_prompts(
    context: Context, generation: Generation, explain: Explain = as_openai
) -> AsyncIterator[None]:
    """Replace the error of a prompt that is too long by an error with the lengths of the prompt and the context.

    Args:
        context: What the endpoints share.
        generation: The jobs of the request.
        explain: Returns the error in the form of the API.

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
        with suppress(LlamaqError):  # then the error of the job is raised as it is
            n_tokens = await _longest_prompt(generation.client, generation.requests)
        if card is None or not n_tokens:
            raise
        raise explain(n_tokens, card.context_limit) from exc


def _with_lengths(n_tokens: int, n_ctx: int, code: str) -> RequestRefused:
    return RequestRefused(
        HTTPStatus.BAD_REQUEST,
        f"the request exceeds the available context size: the prompt has {n_tokens} tokens, and prompt and answer "
        f"together can have {n_ctx}",
        code=code,
        details={"n_prompt_tokens": n_tokens, "n_ctx": n_ctx},
    )


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
