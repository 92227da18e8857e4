"""GET /v1/models: the queues that live workers serve, and the LoRA adapters of these workers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.queue_and_worker_state import Worker, WorkerCard
from llamaq.gateway.context import context_of
from llamaq.gateway.http.errors import RequestRefused, is_for_anthropic
from llamaq.gateway.http.json_body import json_response
from llamaq.gateway.http.query_parameters import page_fields
from llamaq.gateway.model_names import NamedModel, adapter_model, adapters_of, find_named
from llamaq.gateway.queue_of_request import api_key_of


async def list_models(request: Request) -> Response:
    """Return all queues with a live worker, each followed by the adapters of its workers."""
    served = await context_of(request).queues.served()
    key = api_key_of(request)
    is_anthropic = is_for_anthropic(request.scope)
    default = context_of(request).queues.settings.queue
    data = [
        anthropic_model_object(named, workers) if is_anthropic else model_object(named, workers)
        for queue, workers in served.items()
        if workers and (key is None or key.allows(queue))
        for named in (NamedModel(queue), *(NamedModel(queue, adapter) for adapter in adapters_of(workers)))
        if find_named(model_id(named), default, served) == named  # otherwise a request with this name gets another one
    ]
    if is_anthropic:
        return json_response(page_fields(data, has_more=False))
    # llama-server's own clients read `models`, in the form of Ollama.
    models = [
        {"name": each["id"], "model": each["id"], "type": "model", "capabilities": each["capabilities"]}
        for each in data
    ]
    return json_response({"object": "list", "data": data, "models": models})


async def show_model(request: Request) -> Response:
    """Return one queue with a live worker, or one adapter, named like the `model` of a request."""
    name = request.path_params["model"]
    queues = context_of(request).queues
    served = await queues.served()
    named = find_named(name, queues.settings.queue, served)
    workers = served.get(named.queue) if named else None
    key = api_key_of(request)
    if named is None or not workers or (key is not None and not key.allows(named.queue)):
        raise RequestRefused(
            HTTPStatus.NOT_FOUND, f"no live worker serves a queue {name[:100]!r}", code="model_not_found", param="model"
        )
    is_anthropic = is_for_anthropic(request.scope)
    return json_response(anthropic_model_object(named, workers) if is_anthropic else model_object(named, workers))


def model_id(named: NamedModel) -> str:
    """Return the `model` with which a request names a queue or an adapter."""
    return named.queue if named.adapter is None else adapter_model(named.adapter)


def anthropic_model_object(named: NamedModel, workers: Sequence[Worker]) -> dict[str, Any]:
    """Return the object of Anthropic's API for a queue or an adapter."""
    card = workers[0].card
    created_s = _created_s(workers)
    return {
        "type": "model",
        "id": model_id(named),
        "display_name": model_id(named) if named.adapter else card.model or named.queue,
        "created_at": datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card.context_limit,
        "max_tokens": card.context_limit,
    }


def model_object(named: NamedModel, workers: Sequence[Worker]) -> dict[str, Any]:
    """Return the object of OpenAI's API for a queue or an adapter. The workers of a queue serve the same model.

    The context of one job is bounded by the training context and by the cells of one worker. As with vLLM, `parent` is
    the model that an adapter changes.
    """
    card, adapter = workers[0].card, named.adapter
    return {
        "id": model_id(named),
        "object": "model",
        "created": _created_s(workers),
        "owned_by": "llamaq",
        "parent": None if adapter is None else named.queue,
        "aliases": sorted({worker.card.model for worker in workers}) if adapter is None else [adapter.name],
        "tags": [],
        "capabilities": _capabilities(card),
        "meta": {
            "n_ctx": card.context_limit,
            "n_ctx_train": card.n_ctx_train,
            "n_vocab": card.n_vocab,
            "n_embd": card.n_embd or None,
            "quantization": card.quantization,
            "workers": len(workers),
            "slots": sum(worker.card.n_parallel for worker in workers),
        },
    }


def _created_s(workers: Sequence[Worker]) -> int:
    return min(worker.card.started_ms for worker in workers) // 1000


def _capabilities(card: WorkerCard) -> list[str]:
    """Return what the queue of a worker can be used for, as llama-server and Ollama name it."""
    match card.kind:
        case JobKind.EMBEDDING:
            return ["embedding"]
        case JobKind.RERANKING:
            return ["rerank"]
        case JobKind.GENERATION:
            return ["completion", "chat"] if card.chat_template else ["completion"]
