"""POST /v1/embeddings, /embeddings and /embedding: the embeddings of texts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.embedding_task import JobKind
from llamaq.gateway.context import context_of
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.prepared.embedding import PreparedEmbedding
from llamaq.gateway.queue_of_request import generation_for, queue_of_kind
from llamaq.producer.openai_format.request_body import read_model


async def embed(request: Request) -> Response:
    """Return the embeddings of one or several texts, in the form of OpenAI's API."""
    return await _embed(request, is_native=False)


async def embed_natively(request: Request) -> Response:
    """Return the embeddings of one or several texts, in the form of llama-server: a list of vectors for each text."""
    return await _embed(request, is_native=True)


async def _embed(request: Request, *, is_native: bool) -> Response:
    fields = await read_object(request)
    client = await queue_of_kind(request, read_model(fields), JobKind.EMBEDDING)
    asked = await PreparedEmbedding.read(context_of(request).queues, client, fields, is_native=is_native)
    return json_response(await asked.answer(await generation_for(request, client, asked.jobs).results()))
