"""POST /v1/rerank and its other names: documents, sorted by how well they answer a query."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.embedding_task import JobKind
from llamaq.gateway.embedding_and_rerank_format import ranking_object, read_ranking_body
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.queue_of_request import generation_for, queue_of_kind
from llamaq.producer.embed_and_rerank import join_results, rank, split_task
from llamaq.producer.openai_format.request_body import read_model


async def rerank(request: Request) -> Response:
    """Return documents by their scores for a query, the best one first."""
    fields = await read_object(request)
    body = read_ranking_body(fields)
    model = read_model(fields)
    client = await queue_of_kind(request, model, JobKind.RERANKING)
    tasks = split_task(body.documents, query=body.query)
    scores = join_results(await generation_for(request, client, tasks).results())
    n_tokens = sum(each.n_tokens for each in scores)
    return json_response(ranking_object(rank(scores, body.top_n), body, model or client.queue, n_tokens))
