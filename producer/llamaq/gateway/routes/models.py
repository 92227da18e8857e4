"""GET /v1/models: the queues that live workers serve, and the LoRA adapters of these workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from llamaq.gateway.model_names import NamedModel, Served, adapters_of, allowed_by, id_of, names_of
from llamaq.gateway.queue_of_request import api_key_of


async def list_models(request: Request) -> Response:
    """Return all queues with a live worker, each followed by the adapters of its workers."""
    served, names = await _allowed(request)
    object_of = _form_of(request)
    data = [
        object_of(name, named, workers)
        for queue, workers in served.items()
        if workers
        for named in (NamedModel(queue), *(NamedModel(queue, adapter) for adapter in adapters_of(workers)))
        if (name := id_of(named, names)) is not None
    ]
    if is_for_anthropic(request.scope):
        return json_response(page_fields(data, has_more=False))
    # llama-server's own clients read `models`, in the form of Ollama.
    models = [
        {"name": each["id"], "model": each["id"], "type": "model", "capabilities": each["capabilities"]}
        for each in data
    ]
    return json_response({"object": "list", "data": data, "models": models})


async def show_model(request: Request) -> Response:
    """Return one queue with a live worker, or one adapter, named like the `model` of a request."""
    asked = request.path_params["model"]
    served, names = await _allowed(request)
    named = names.get(asked)
    workers = served.get(named.queue) if named else None
    if named is None or not workers:
        raise RequestRefused(
            HTTPStatus.NOT_FOUND,
            f"no live worker serves a model {asked[:100]!r}",
            code="model_not_found",
            param="model",
        )
    return json_response(_form_of(request)(id_of(named, names) or asked, named, workers))


async def _allowed(request: Request) -> tuple[Served, dict[str, NamedModel]]:
    """Return the queues that the API key of a request allows, and the names in them."""
    queues = context_of(request).queues
    served = allowed_by(api_key_of(request), await queues.served())
    return served, names_of(queues.settings.queue, served)


def _form_of(request: Request) -> Callable[[str, NamedModel, Sequence[Worker]], dict[str, Any]]:
    return anthropic_model_object if is_for_anthropic(request.scope) else model_object


def anthropic_model_object(name: str, named: NamedModel, workers: Sequence[Worker]) -> dict[str, Any]:
    """Return the object of Anthropic's API for a queue or an adapter. `name` is its id."""
    card = workers[0].card
    created_s = _created_s(workers)
    return {
        "type": "model",
        "id": name,
        "display_name": name if named.adapter else card.model or name,
        "created_at": datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card.context_limit,
        "max_tokens": card.context_limit,
    }


def model_object(name: str, named: NamedModel, workers: Sequence[Worker]) -> dict[str, Any]:
    """Return the object of OpenAI's API for a queue or an adapter. `name` is its id.

    The workers of a queue serve the same model. The context of one job is bounded by the training context and by the
    cells of one worker. As with vLLM, `parent` is the model that an adapter changes. Clients that know vLLM but not
    llama-server read the context from `max_model_len`.
    """
    card, adapter = workers[0].card, named.adapter
    return {
        "id": name,
        "object": "model",
        "created": _created_s(workers),
        "owned_by": "llamaq",
        "parent": None if adapter is None else named.queue,
        "max_model_len": card.context_limit,
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
