"""What the endpoints share: the settings and the queues."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from llamaq.gateway.batches.runner import BatchRunner
from llamaq.gateway.keys.key_store import KeyStore
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.settings import ServeSettings


@dataclass(frozen=True, slots=True)
class Context:
    """What the endpoints of one server share."""

    settings: ServeSettings
    queues: QueueDirectory
    keys: KeyStore
    models: ModelKnowledge
    batches: BatchRunner


def context_of(request: Request) -> Context:
    """Return the context of the server that has received a request."""
    context: Context = request.app.state.context
    return context
