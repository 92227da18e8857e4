"""Chooses the queue of a request, which its API key must allow, and adds job options to those of the body: of the model
that the body names, of the API key, and of the headers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.job_request import TRACEPARENT_PATTERN
from llamaq.gateway.context import context_of
from llamaq.gateway.generation import Generation
from llamaq.gateway.http.errors import invalid
from llamaq.gateway.keys.key_record import KeyRecord
from llamaq.gateway.model_names import allowed_by
from llamaq.producer import AsyncClient
from llamaq.producer.submission import current_traceparent

IDEMPOTENCY_HEADER = "Idempotency-Key"
MAX_IDEMPOTENCY_CHARS = 255
DELAYS = ("delay_s", "run_at")
"""Job options that only a response in the background may have, because other requests would keep their connections
open."""


def api_key_of(request: Request) -> KeyRecord | None:
    """Return the API key of a request. None: the server requires none."""
    record: KeyRecord | None = getattr(request.state, "api_key", None)
    return record


def owner_of(request: Request) -> str | None:
    """Return the name of the API key of a request. None: the server requires none."""
    key = api_key_of(request)
    return None if key is None else key.name


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """The model that a request names, and that its API key allows."""

    client: AsyncClient
    """The client of the queue."""
    job_options: Mapping[str, Any]
    """The options of the jobs of the request, unless its body sets them."""


async def model_for(request: Request, model: str | None, *, is_stored: bool = False) -> ChosenModel:
    """Return what a request names by its `model`.

    Args:
        request: The request.
        model: The `model` of the request. None: it has none.
        is_stored: Whether the results of the jobs of the client are stored for `response_ttl_s`.

    Raises:
        RequestRefused: There is no such model, or the API key of the request does not allow its queue.
        NoWorker: The queue has no live worker, and requests do not wait for one.
    """
    queues = context_of(request).queues
    named = await queues.find_allowed(model, api_key_of(request))
    return ChosenModel(await queues.client(named.queue, is_stored=is_stored), named.job_options)


async def queue_for(request: Request, model: str | None) -> AsyncClient:
    """Return the client of the queue that a request means by its `model`.

    Raises:
        RequestRefused: As in `model_for`.
        NoWorker: As in `model_for`.
    """
    return (await model_for(request, model)).client


async def model_of_kind(request: Request, model: str | None, kind: JobKind) -> ChosenModel:
    """Return what a request names by its `model`, for embeddings or rankings, which have no options for adapters.

    A request that names no queue uses the default queue, or if that queue is of another kind, the first queue of this
    kind that its API key allows.

    Raises:
        RequestRefused: As in `model_for`.
        NoWorker: As in `model_for`.
    """
    queues, key = context_of(request).queues, api_key_of(request)
    named, served = await queues.find(model, key), await queues.served()
    allowed = allowed_by(key, served)
    if model is None or not queues.is_name(model, key):  # if a named queue is of another kind, the submit says so
        fitting = [queue for queue in allowed if any(worker.card.kind is kind for worker in allowed[queue])]
        if fitting and named.queue not in fitting:
            model = fitting[0]
    return ChosenModel(await queue_for(request, model), {})


def generation_for(
    request: Request,
    model: ChosenModel,
    jobs: Sequence[dict[str, Any]],
    *,
    is_kept: bool = False,
    is_background: bool = False,
) -> Generation:
    """Return the jobs of a request, with the options that its model, its API key and its headers set.

    With the header `Idempotency-Key`, a repeated request finds its jobs again. The jobs belong to the span of the
    header `traceparent`, unless the server itself creates spans.

    Args:
        request: The request.
        model: The model that the request names.
        jobs: The arguments of `submit` for each job.
        is_kept: Whether the jobs continue without their client, once it has their ids.
        is_background: Whether the client need not wait for the answer. Only such jobs may have a delay.

    Raises:
        RequestRefused: The header `Idempotency-Key` is not valid, or a job has a delay that it may not have.
    """
    if not is_background:
        _refuse_delays(jobs)
    key, trace = api_key_of(request), _trace_of(request)
    full = [{**model.job_options, **trace, **job} for job in jobs]
    allowed = full if key is None else [key.job_options(job) for job in full]
    context = context_of(request)
    return Generation(
        model.client,
        allowed,
        idempotency_key_of(request),
        is_kept=is_kept,
        max_tokens=context.settings.default_max_tokens,
        renew_client=context.queues.renewed,
    )


def _refuse_delays(jobs: Sequence[dict[str, Any]]) -> None:
    if given := next((name for job in jobs for name in DELAYS if job.get(name) is not None), None):
        raise invalid(f"{given}: this request waits for its answer; use /v1/responses with `background`: true", given)


def _trace_of(request: Request) -> dict[str, str]:
    """Return the job option `traceparent`, if a header names the span of the caller. Other forms of it are ignored."""
    given = request.headers.get("traceparent", "")
    is_used = re.fullmatch(TRACEPARENT_PATTERN, given) and current_traceparent() is None
    return {"traceparent": given} if is_used else {}


def idempotency_key_of(request: Request) -> str | None:
    """Return a text that a repeated request has too, by its header `Idempotency-Key`. None: it has no such header.

    Raises:
        RequestRefused: The header is not valid.
    """
    given = request.headers.get(IDEMPOTENCY_HEADER)
    if given is None:
        return None
    if not 0 < len(given) <= MAX_IDEMPOTENCY_CHARS:
        raise invalid(f"{IDEMPOTENCY_HEADER}: 1 to {MAX_IDEMPOTENCY_CHARS} characters are required", IDEMPOTENCY_HEADER)
    # The same key of another caller, or at another endpoint, means another request.
    key = api_key_of(request)
    parts = (key.name if key else "", request.url.path, given)
    return "http-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()
