"""What the `model` of a request names: a queue, the model of its workers, or one of their LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.queue_and_worker_state import LoraScale, Worker
from llamaq.gateway.keys.key_record import KeyRecord

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
    """Return what a `model` names, see `names_of`. None: nothing.

    Args:
        model: The `model` of a request. None: it has none, and means the server's own queue.
        default: The server's own queue.
        served: The queues that the caller may use, and their workers.
    """
    if model is None or model == default:
        return NamedModel(default)
    if model in served:
        return NamedModel(model)
    return names_of(default, served).get(model)


def names_of(default: str, served: Served) -> dict[str, NamedModel]:
    """Return all names that a `model` may have, and what they name.

    The name of a queue takes precedence over that of a model, this over the name of an adapter's file, and this over
    the name of such a file without its ending. If several queues have the same model, the first of them by name is
    used. If several have the same adapter, the server's own queue comes before the others.

    Args:
        default: The server's own queue.
        served: The queues that the caller may use, and their workers.
    """
    names = {queue: NamedModel(queue) for queue in (default, *served)}
    for queue, workers in served.items():
        for worker in workers:
            names.setdefault(worker.card.model, NamedModel(queue))
    own_first = sorted(served, key=lambda queue: queue != default)
    adapters = [(each, NamedModel(queue, each)) for queue in own_first for each in adapters_of(served[queue])]
    for adapter, named in adapters:
        names.setdefault(adapter.name, named)
    for adapter, named in adapters:
        names.setdefault(adapter_model(adapter), named)
    return names


def id_of(named: NamedModel, names: Mapping[str, NamedModel]) -> str | None:
    """Return the shortest `model` with which a request names a queue or an adapter.

    Args:
        named: The queue or the adapter.
        names: The names of `names_of`.

    Returns:
        None: its names name something else.
    """
    candidates = (named.queue,) if named.adapter is None else (adapter_model(named.adapter), named.adapter.name)
    return next((name for name in candidates if names.get(name) == named), None)


def allowed_by(key: KeyRecord | None, served: Served) -> Served:
    """Return the queues that an API key may use, and their workers. None: there is no key, and all may be used."""
    return served if key is None else {queue: served[queue] for queue in served if key.allows(queue)}


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
    return adapter.name.removesuffix(GGUF_ENDING) or adapter.name
