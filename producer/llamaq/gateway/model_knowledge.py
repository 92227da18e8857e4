"""What the server has learned from workers about the models of the queues."""

from __future__ import annotations

from dataclasses import dataclass

from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.token_bytes_cache import TokenPieces
from llamaq.producer.answer_form_detection import AnswerForms


@dataclass(frozen=True, slots=True)
class ModelKnowledge:
    """What is needed to prepare requests, and to build their answers."""

    queues: QueueDirectory
    pieces: TokenPieces
    """The bytes of tokens."""
    forms: AnswerForms
    """How the answers of models are written."""
