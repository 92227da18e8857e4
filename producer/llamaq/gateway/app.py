"""Builds the ASGI application: its endpoints and its middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llamaq.common.errors import LlamaqError
from llamaq.gateway.batches.runner import BatchRunner
from llamaq.gateway.chat_page import chat_page
from llamaq.gateway.context import Context
from llamaq.gateway.http.cors import Cors, cors_options
from llamaq.gateway.http.errors import RequestRefused, respond_to_error
from llamaq.gateway.http.json_body import json_response
from llamaq.gateway.http.open_requests import Defects, OpenRequests
from llamaq.gateway.http.origin_check import OriginCheck
from llamaq.gateway.http.request_ids import RequestIds
from llamaq.gateway.http.request_lifetime import RequestLifetime
from llamaq.gateway.http.trailing_slashes import TrailingSlashes
from llamaq.gateway.keys.key_check import KeyCheck
from llamaq.gateway.keys.key_file import KeyFile
from llamaq.gateway.keys.key_store import KeyStore
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.openapi import describe
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.routes import (
    batches,
    completions,
    embeddings_and_rerank,
    files,
    llama_server_completion,
    messages,
    models,
    responses,
    slots_props_metrics,
    texts,
)
from llamaq.gateway.settings import ServeSettings
from llamaq.gateway.token_bytes_cache import TokenBytesCache
from llamaq.producer.answer_forms import AnswerForms

ROUTES = [
    Route("/health", slots_props_metrics.health),
    Route("/v1/health", slots_props_metrics.health),
    Route("/v1/models", models.list_models),
    Route("/models", models.list_models),
    Route("/v1/models/{model}", models.show_model),
    Route("/v1/chat/completions", completions.chat, methods=["POST"]),
    Route("/chat/completions", completions.chat, methods=["POST"]),
    Route("/v1/completions", completions.complete, methods=["POST"]),
    Route("/v1/chat/completions/input_tokens", texts.count_input_tokens, methods=["POST"]),
    Route("/chat/completions/input_tokens", texts.count_input_tokens, methods=["POST"]),
    Route("/v1/responses", responses.create, methods=["POST"]),
    Route("/responses", responses.create, methods=["POST"]),
    Route("/v1/responses/input_tokens", responses.count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{response}", responses.retrieve),
    Route("/v1/responses/{response}", responses.delete, methods=["DELETE"]),
    Route("/v1/responses/{response}/cancel", responses.cancel, methods=["POST"]),
    Route("/v1/responses/{response}/input_items", responses.list_input_items),
    Route("/v1/files", files.create, methods=["POST"]),
    Route("/v1/files", files.list_files),
    Route("/v1/files/{file}", files.retrieve),
    Route("/v1/files/{file}", files.delete, methods=["DELETE"]),
    Route("/v1/files/{file}/content", files.content),
    Route("/v1/batches", batches.create, methods=["POST"]),
    Route("/v1/batches", batches.list_batches),
    Route("/v1/batches/{batch}", batches.retrieve),
    Route("/v1/batches/{batch}/cancel", batches.cancel, methods=["POST"]),
    Route("/v1/messages", messages.answer, methods=["POST"]),
    Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
    Route("/completion", llama_server_completion.complete, methods=["POST"]),
    Route("/completions", llama_server_completion.complete, methods=["POST"]),
    Route("/infill", llama_server_completion.fill_gap, methods=["POST"]),
    Route("/v1/embeddings", embeddings_and_rerank.embed, methods=["POST"]),
    Route("/embeddings", embeddings_and_rerank.embed_natively, methods=["POST"]),
    Route("/embedding", embeddings_and_rerank.embed_natively, methods=["POST"]),
    Route("/v1/rerank", embeddings_and_rerank.rerank, methods=["POST"]),
    Route("/v1/reranking", embeddings_and_rerank.rerank, methods=["POST"]),
    Route("/rerank", embeddings_and_rerank.rerank, methods=["POST"]),
    Route("/reranking", embeddings_and_rerank.rerank, methods=["POST"]),
    Route("/tokenize", texts.tokenize, methods=["POST"]),
    Route("/detokenize", texts.detokenize, methods=["POST"]),
    Route("/apply-template", texts.apply_template, methods=["POST"]),
    Route("/props", slots_props_metrics.props),
    Route("/tokenizer_info", slots_props_metrics.tokenizer_info),
    Route("/lora-adapters", slots_props_metrics.list_adapters),
    Route("/slots", slots_props_metrics.list_slots),
    Route("/slots/{slot}", slots_props_metrics.act_on_slot, methods=["POST"]),
    Route("/metrics", slots_props_metrics.metrics),
]


async def openapi(_: Request) -> Response:
    """Return this description of the API."""
    return json_response(describe(ROUTES))


ROUTES += [Route("/openapi.json", openapi), Route("/", chat_page)]
DISABLED_PATHS = {"page": "/", "metrics": "/metrics", "props": "/props", "slots": "/slots"}
"""Maps a name in the setting `disabled_endpoints` to the path of its endpoint. All paths below it belong to it."""


def enabled_routes(routes: Sequence[Route], disabled: Sequence[str]) -> list[Route]:
    """Return the routes of a server. Its disabled endpoints answer 501, as with llama-server, and the page 404."""
    paths = [DISABLED_PATHS[name] for name in disabled]
    refused = [route for route in routes if any(_is_at_or_below(route.path, path) for path in paths)]
    kept = [route for route in routes if route not in refused]
    answered = dict.fromkeys(route.path for route in refused if route.path != "/")
    return kept + [Route(path, _refuse, methods=["GET", "POST"]) for path in answered]


def _is_at_or_below(route_path: str, path: str) -> bool:
    return route_path == path or route_path.startswith(f"{path}/")


async def _refuse(request: Request) -> Response:
    path = request.url.path
    raise RequestRefused(
        HTTPStatus.NOT_IMPLEMENTED, f"this server runs without {path} (its setting disabled_endpoints)", code="disabled"
    )


def build_app(settings: ServeSettings) -> Starlette:
    """Return the application. It connects to Redis when its lifespan begins.

    Raises:
        InvalidSettings: The file with the API keys cannot be read.
    """
    open_requests = OpenRequests()
    key_file = None if settings.keys_file is None else KeyFile(settings.keys_file)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        queues = QueueDirectory(settings)
        keys = KeyStore(queues.default.redis, queues.default.keys, key_file)
        forms, waits = AnswerForms(queues.last_card), settings.wait_for_worker
        models = ModelKnowledge(queues, TokenBytesCache(queues), forms, waits=waits)
        runner = BatchRunner(settings, models, keys)
        app.state.context = Context(settings, queues, keys, models, runner)
        runner.start()
        try:
            yield
        finally:
            await runner.aclose()
            await queues.aclose()

    errors = (LlamaqError, RedisError, OSError, HTTPException)
    app = Starlette(
        routes=enabled_routes(ROUTES, settings.disabled_endpoints),
        middleware=_middleware(settings, open_requests),
        exception_handlers=dict.fromkeys(errors, respond_to_error),
        lifespan=lifespan,
    )
    app.state.open_requests = open_requests
    return app


def _middleware(settings: ServeSettings, open_requests: OpenRequests) -> list[Middleware]:
    """Return the middleware, from the outside to the inside."""
    cors = Middleware(Cors, **cors_options(settings.cors_origins))
    return [
        Middleware(TrailingSlashes),
        Middleware(RequestIds),
        *([cors] if settings.cors_origins else []),
        Middleware(Defects),
        Middleware(OriginCheck, cors_origins=settings.cors_origins),
        *([Middleware(KeyCheck)] if settings.require_key else []),
        Middleware(
            RequestLifetime,
            open_requests=open_requests,
            max_body_bytes=settings.max_body_bytes,
            body_timeout_s=settings.body_timeout_s,
        ),
    ]
