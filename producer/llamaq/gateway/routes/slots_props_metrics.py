"""GET /health, /slots, /props, /metrics and others, and POST /slots/{id}: server and workers, as llama-server shows
itself.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from llamaq.common.errors import NoWorker
from llamaq.common.protocol.queue_and_worker_state import SlotSnapshot, Worker
from llamaq.gateway.context import context_of
from llamaq.gateway.http.errors import RequestRefused, invalid
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.http.query_parameters import read_query_flag
from llamaq.gateway.llama_metrics import metrics_text
from llamaq.gateway.native_format import adapter_objects, props_object, slot_object, tokenizer_object
from llamaq.gateway.queue_of_request import api_key_of, queue_for
from llamaq.producer import AsyncClient

HEALTH_TIMEOUT_S = 3.0
"""How long `/health` waits for Redis. Load balancers usually wait 5 s for the answer. With Sentinel or a cluster, the
retries of a call last much longer."""
MAX_SLOT_DIGITS = 9


async def health(request: Request) -> Response:
    """Return the status 200 if Redis answers within `HEALTH_TIMEOUT_S`, otherwise 503.

    Workers are not checked, because requests may wait for one.
    """
    async with asyncio.timeout(HEALTH_TIMEOUT_S):  # TimeoutError is an OSError, and has the status 503
        await context_of(request).queues.default.redis.ping()
    return json_response({"status": "ok"})


async def list_slots(request: Request) -> Response:
    """Return the slots of all workers of a queue, as of their last heartbeats."""
    _, workers = await _queue_of(request)
    slots = _numbered(workers)
    if read_query_flag(request, "fail_on_no_slot") and all(slot.job_id is not None for _, slot in slots):
        raise RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, "no slot is free", code="no_slot")
    return json_response([slot_object(worker, slot, number) for number, (worker, slot) in enumerate(slots)])


async def act_on_slot(request: Request) -> Response:
    """Save, restore or erase the content of a slot, by the query parameter `action`."""
    _check_may_manage_slots(request)
    client, workers = await _queue_of(request)
    given, slots = request.path_params["slot"], _numbered(workers)
    number = int(given) if given.isdecimal() and len(given) <= MAX_SLOT_DIGITS else len(slots)
    if number >= len(slots):
        raise invalid(f"id_slot: the workers have {len(slots)} slots, from 0 on", "id_slot")
    worker, slot = slots[number][0].card.worker, slots[number][1].index
    match request.query_params.get("action"):
        case "erase":
            return json_response({"id_slot": number, "n_erased": await client.erase_slot(slot, worker=worker)})
        case "save":
            name, filename = await _file_name(request)
            saved = await client.save_slot(slot, name, worker=worker)
            timings = {"save_ms": saved.duration_ms}
            counts = {"n_saved": saved.n_tokens, "n_written": saved.n_bytes}
        case "restore":
            name, filename = await _file_name(request)
            saved = await client.restore_slot(slot, name, worker=worker)
            timings = {"restore_ms": saved.duration_ms}
            counts = {"n_restored": saved.n_tokens, "n_read": saved.n_bytes}
        case _:
            raise invalid("action: save, restore or erase is required, as a query parameter", "action")
    return json_response({"id_slot": number, "filename": filename, **counts, "timings": timings})


def _check_may_manage_slots(request: Request) -> None:
    """Refuse a request whose API key may not act on slots. A slot may have the content of any key.

    Raises:
        RequestRefused: The key does not allow it: 403.
    """
    key = api_key_of(request)
    if key is not None and not key.manage_slots:
        raise RequestRefused(
            HTTPStatus.FORBIDDEN,
            f"the API key {key.name!r} may not manage slots: only a key of `llamaq keys add --manage-slots` may",
            code="slots_not_allowed",
        )


async def props(request: Request) -> Response:
    """Return the properties of a queue's model."""
    client, workers = await _queue_of(request)
    return json_response(props_object(client.queue, workers))


async def tokenizer_info(request: Request) -> Response:
    """Return the special tokens and the chat template of a queue's model, as vLLM does."""
    _, workers = await _queue_of(request)
    return json_response(tokenizer_object(workers[0].card))


async def list_adapters(request: Request) -> Response:
    """Return the LoRA adapters of a queue's model."""
    _, workers = await _queue_of(request)
    return json_response(adapter_objects(workers[0].card))


async def metrics(request: Request) -> Response:
    """Return the sums over all queues and live workers, under the names of llama-server."""
    queues = context_of(request).queues
    served = await queues.served(is_fresh=True)
    counts: Counter[str] = Counter()
    for queue in served:
        counts.update(await queues.job_counters(queue))
    depths = [await queues.depth(queue) for queue in served]
    workers = [worker for each in served.values() for worker in each]
    started_ms = min((worker.card.started_ms for worker in workers), default=0)
    return PlainTextResponse(
        metrics_text(counts, depths, workers),
        media_type="text/plain; version=0.0.4",
        headers={"Process-Start-Time-Unix": str(started_ms // 1000)},
    )


def _numbered(workers: Sequence[Worker]) -> list[tuple[Worker, SlotSnapshot]]:
    """Return the slots of all workers. The position of a slot is its number in this API."""
    return [(worker, slot) for worker in workers for slot in worker.slots]


async def _queue_of(request: Request) -> tuple[AsyncClient, tuple[Worker, ...]]:
    """Return the client and the workers of the queue that the query parameter `model` means.

    Raises:
        NoWorker: The queue has no live worker.
    """
    client = await queue_for(request, request.query_params.get("model"))
    workers = (await context_of(request).queues.served(is_fresh=True)).get(client.queue)
    if not workers:
        raise NoWorker(client.queue)
    return client, workers


async def _file_name(request: Request) -> tuple[str, str]:
    """Return the name of the saved state, and the `filename` of the request. Only the latter may have dots."""
    body: dict[str, Any] = await read_object(request)
    filename = body.get("filename")
    if not isinstance(filename, str):
        raise invalid("filename: a text is required", "filename")
    name = filename.replace(".", "_")
    if not re.fullmatch(r"[A-Za-z0-9_\-]{1,64}", name):
        raise invalid("filename: 1 to 64 letters, digits, dots, `_` or `-` are required", "filename")
    return name, filename
