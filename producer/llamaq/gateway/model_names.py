"""What the `model` of a request names: a queue, the model of its workers, or one of their LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.queue_and_worker_state import LoraScale, Worker

Served = Mapping[str, tuple[Worker, ...]]
"""The known queues and their live workers."""
GGUF_ENDING = ".gguf"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A queue, and the adapter that its jobs use alone, if the request names one."""

    queue: str
    adapter: LoraScale | None = None
    """None: the jobs use the adapters of the worker with its scales."""

    @property
    def job_options(self) -> dict[str, Any]:
        """The options of the jobs of such a request, unless the request sets them.

        An adapter whose scale is 0 waits for jobs that ask for it. They get it with its full strength.
        """
        return {} if self.adapter is None else {"lora": {self.adapter.name: self.adapter.scale or 1.0}}


def find_named(model: str | None, default: str, served: Served) -> NamedModel | None:
    """Return what a `model` names. None: nothing.

    The name of a queue takes precedence over that of a model, and this over that of an adapter. If several queues have
    the same model or adapter, the first of them by name is used.

    Args:
        model: The `model` of a request. None: it has none, and means the server's own queue.
        default: The server's own queue.
        served: The queues and their workers.
    """
    if model is None or model == default:
        return NamedModel(default)
    if model in served:
        return NamedModel(model)
    for queue, workers in served.items():
        if any(worker.card.model == model for worker in workers):
            return NamedModel(queue)
    for queue, workers in served.items():
        for adapter in adapters_of(workers):
            if model in (adapter.name, adapter_model(adapter)):
                return NamedModel(queue, adapter)
    return None


def adapters_of(workers: tuple[Worker, ...]) -> list[LoraScale]:
    """Return the adapters that the jobs of a queue can name, those of all its workers. Equal names appear once."""
    generating = (worker.card for worker in workers if worker.card.kind is JobKind.GENERATION)
    by_name: dict[str, LoraScale] = {}
    for card in generating:
        for adapter in card.lora:
            by_name.setdefault(adapter.name, adapter)
    return list(by_name.values())


def adapter_model(adapter: LoraScale) -> str:
    """Return the name that an adapter has as a model: that of its file, without the ending."""
    return adapter.name.removesuffix(GGUF_ENDING)
