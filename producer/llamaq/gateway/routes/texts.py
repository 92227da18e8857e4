"""Tokens, texts and rendered chats: the endpoints of llama-server and of vLLM. A worker of the queue does the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.text_commands import TextAction, TextReply
from llamaq.gateway.context import context_of
from llamaq.gateway.http.errors import RequestRefused, invalid
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.queue_of_request import queue_for
from llamaq.producer import AsyncClient
from llamaq.producer.openai_format.chat_messages import read_chat
from llamaq.producer.openai_format.request_body import read_flag, read_model
from llamaq.producer.queries import text_commands


async def tokenize(request: Request) -> Response:
    """Return the tokens of the field `content` (llama-server), or of `prompt` or `messages` (vLLM)."""
    body, client = await _read(request)
    content = body.get("content")
    if content is not None:
        return await _tokenize_content(client, body, content)
    if "messages" in body:
        reply = await _ask(client, TextAction.TOKENIZE, **read_chat(body))
    elif isinstance(body.get("prompt"), str):
        add_special = read_flag({"add_special_tokens": True, **body}, "add_special_tokens")
        reply = await _ask(client, TextAction.TOKENIZE, text=body["prompt"], add_special=add_special)
    else:
        raise invalid("one of the fields is required: content (a text), prompt (a text) or messages", "content")
    workers = (await context_of(request).queues.served()).get(client.queue, ())
    context = min((worker.card.context_limit for worker in workers), default=None)
    return json_response({"tokens": reply.tokens, "count": len(reply.tokens), "max_model_len": context})


async def _tokenize_content(client: AsyncClient, body: Mapping[str, Any], content: Any) -> Response:
    if not isinstance(content, str):
        raise invalid("content: a text is required", "content")
    with_pieces = read_flag(body, "with_pieces")
    parse_special = body.get("parse_special") is None or read_flag(body, "parse_special")
    reply = await _ask(
        client,
        TextAction.TOKENIZE,
        text=content,
        add_special=read_flag(body, "add_special"),
        parse_special=parse_special,
        with_pieces=with_pieces,
    )
    if reply.parse_special is not parse_special:
        raise RequestRefused(
            HTTPStatus.NOT_IMPLEMENTED,
            "parse_special: the worker has an older version of llamaq, which knows only true: upgrade it",
            param="parse_special",
        )
    if not with_pieces:
        return json_response({"tokens": reply.tokens})
    pieces = zip(reply.tokens, reply.pieces, strict=True)
    return json_response({"tokens": [{"id": token, "piece": _text_or_bytes(piece)} for token, piece in pieces]})


def _text_or_bytes(piece: Sequence[int]) -> str | Sequence[int]:
    """Return the text of a token, or its bytes if they are only a part of a character."""
    try:
        return bytes(piece).decode()
    except UnicodeDecodeError:
        return piece


async def detokenize(request: Request) -> Response:
    """Return the text of tokens, under the names of llama-server and of vLLM."""
    body, client = await _read(request)
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise invalid("tokens: a list of token ids is required", "tokens")
    text = (await _ask(client, TextAction.DETOKENIZE, tokens=tokens)).text if tokens else ""
    return json_response({"content": text, "prompt": text})


async def apply_template(request: Request) -> Response:
    """Return a chat as the text that the model reads."""
    body, client = await _read(request)
    return json_response({"prompt": (await _ask(client, TextAction.APPLY_TEMPLATE, **read_chat(body))).text})


async def count_input_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of a chat has."""
    body, client = await _read(request)
    reply = await _ask(client, TextAction.TOKENIZE, **read_chat(body))
    return json_response({"object": "response.input_tokens", "input_tokens": len(reply.tokens)})


async def _read(request: Request) -> tuple[dict[str, Any], AsyncClient]:
    """Return the body and the client of the queue that it means."""
    body = await read_object(request)
    return body, await queue_for(request, read_model(body))


async def _ask(client: AsyncClient, action: TextAction, **values: Any) -> TextReply:
    return await text_commands.ask(client.connection, action, None, **values)
