"""What the endpoints share: the settings and the queues."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from starlette.requests import Request

from llamaq.gateway.answer_forms import AnswerForms
from llamaq.gateway.batches.runner import BatchRunner
from llamaq.gateway.keys.key_store import KeyStore
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.settings import ServeSettings
from llamaq.gateway.token_pieces import TokenPieces

FINGERPRINT = f"build-llamaq-{version('llamaq')}"
"""The `system_fingerprint` of answers. As with llama-server, it begins with a `b`."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the endpoints of one server share."""

    settings: ServeSettings
    queues: QueueDirectory
    keys: KeyStore
    pieces: TokenPieces
    forms: AnswerForms
    batches: BatchRunner


def context_of(request: Request) -> Context:
    """Return the context of the server that has received a request."""
    context: Context = request.app.state.context
    return context
