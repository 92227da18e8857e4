"""The interface of `GenerationParts` and `EmbeddingParts`: the parts of a worker that depend on the kind of its
jobs.
"""

from __future__ import annotations

from typing import Any, Protocol

from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.broker.command_inbox import CommandHandler
from llamaq.worker.broker.preparations import Preparer
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.engine_loop.tick_parts_interface import BatchDrafter, JobScheduler, Runner


class ModelEngine(Runner, Protocol):
    """An engine: a model with a context."""

    model: Model
    vocab: Vocab


class ModelParts(Protocol):
    """`GenerationParts` or `EmbeddingParts`."""

    @property
    def engine(self) -> ModelEngine:
        """Computes the batches of the scheduler."""

    @property
    def drafter(self) -> BatchDrafter | None:
        """Adds drafts to the batches of the scheduler. None: there is no draft model."""

    @property
    def scheduler(self) -> JobScheduler:
        """Decides which jobs run."""

    @property
    def preparer(self) -> Preparer:
        """Turns requests into jobs of the scheduler."""

    def make_slot_commands(self, ticks: TickLoop) -> CommandHandler:
        """Return the handler of the commands of operators about slots."""

    def set_n_threads(self, n_threads: int) -> None:
        """Change the number of llama.cpp's threads where the settings leave it open. Call it on the engine thread."""

    def place_engine_thread(self) -> None:
        """Let the engine thread, which calls this, run on the CPUs and with the priority of llama.cpp's threads."""

    def card_fields(self) -> dict[str, Any]:
        """Return the fields of the worker's card that describe the model and its context."""

    def close(self) -> None:
        """Save the prefix cache and end the grammar process, after the last tick and after the jobs were requeued.

        Preparations that wait for a grammar fail. `free_model` frees the model.
        """

    def free_model(self) -> None:
        """Free the model, after `close`. No thread may use the model or its vocabulary any more."""
