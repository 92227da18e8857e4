"""The endpoints of queues whose workers generate no text.

- POST /v1/embeddings, /embeddings and /embedding: the embeddings of texts.
- POST /v1/rerank and its other names: documents, sorted by how well they answer a query.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.embedding_task import JobKind
from llamaq.gateway.context import context_of
from llamaq.gateway.embedding_and_rerank_format import ranking_object, read_ranking_body
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.prepared.embedding import PreparedEmbedding
from llamaq.gateway.queue_of_request import generation_for, model_of_kind
from llamaq.producer.embed_and_rerank import join_results, rank, split_task
from llamaq.producer.openai_format.request_body import read_model


async def embed(request: Request) -> Response:
    """Return the embeddings of one or several texts, in the form of OpenAI's API."""
    return await _embed(request, is_native=False)


async def embed_natively(request: Request) -> Response:
    """Return the embeddings of one or several texts, in the form of llama-server: a list of vectors for each text."""
    return await _embed(request, is_native=True)


async def _embed(request: Request, *, is_native: bool) -> Response:
    fields = await read_object(request)
    model = await model_of_kind(request, read_model(fields), JobKind.EMBEDDING)
    asked = await PreparedEmbedding.read(context_of(request).queues, model.client, fields, is_native=is_native)
    answer = await asked.answer(await generation_for(request, model, asked.jobs).results())
    return Response(answer, media_type="application/json")


async def rerank(request: Request) -> Response:
    """Return documents by their scores for a query, the best one first."""
    fields = await read_object(request)
    body = read_ranking_body(fields)
    name = read_model(fields)
    model = await model_of_kind(request, name, JobKind.RERANKING)
    jobs = [{**body.options, **task} for task in split_task(body.documents, query=body.query)]
    scores = join_results(await generation_for(request, model, jobs).results())
    n_tokens = sum(each.n_tokens for each in scores)
    return json_response(ranking_object(rank(scores, body.top_n), body, name or model.client.queue, n_tokens))
