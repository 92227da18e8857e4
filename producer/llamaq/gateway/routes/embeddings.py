"""POST /v1/embeddings, /embeddings and /embedding: the embeddings of texts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.embedding import JobKind, Pooling
from llamaq.gateway.context import context_of
from llamaq.gateway.embedding_format import EmbeddingBody, embedding_list, native_embeddings, read_embedding_body
from llamaq.gateway.http.errors import invalid
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.permissions import generation_for, queue_of_kind
from llamaq.gateway.prompt_texts import with_tokens
from llamaq.producer.embeddings import INPUTS_PER_JOB, join_results, split_task
from llamaq.producer.openai_format.request_body import read_model

NOT_POOLED = (
    "the workers of this queue do not pool (--pooling none), so a text has no single embedding: start them with "
    "another --pooling, or use POST /embeddings"
)


async def embed(request: Request) -> Response:
    """Return the embeddings of one or several texts, in the form of OpenAI's API."""
    return await _embed(request, is_native=False)


async def embed_natively(request: Request) -> Response:
    """Return the embeddings of one or several texts, in the form of llama-server: a list of vectors for each text."""
    return await _embed(request, is_native=True)


async def _embed(request: Request, *, is_native: bool) -> Response:
    fields = await read_object(request)
    body = read_embedding_body(fields)
    model = read_model(fields)
    client = await queue_of_kind(request, model, JobKind.EMBEDDING)
    is_native = is_native or body.is_native
    card = await context_of(request).queues.card(client.queue)
    if card is not None and card.pooling is Pooling.NONE:
        _check_unpooled(body, is_native=is_native)
    inputs = (await with_tokens(client, {"prompt": body.inputs}))["prompt"]
    tasks = split_task(inputs, dimensions=body.dimensions, normalization=body.normalization)
    embeddings = join_results(await generation_for(request, client, tasks).results())
    if is_native:
        return json_response(native_embeddings(embeddings))
    if any(each.n_rows != 1 for each in embeddings):  # the worker has started meanwhile
        raise invalid(NOT_POOLED)
    return json_response(embedding_list(embeddings, model or client.queue, is_base64=body.is_base64))


def _check_unpooled(body: EmbeddingBody, *, is_native: bool) -> None:
    """Refuse what workers that do not pool cannot answer. Their answers have a vector for each token of each text."""
    if not is_native:
        raise invalid(NOT_POOLED)
    if len(body.inputs) > INPUTS_PER_JOB:
        raise invalid(
            f"input: at most {INPUTS_PER_JOB} texts, because these workers do not pool (--pooling none)", "input"
        )
