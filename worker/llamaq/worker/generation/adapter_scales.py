"""The scales of the worker's LoRA adapters that a job asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.queue_and_worker_state import LoraScale, adapter_places


class AdapterScales:
    """Reads the option `lora` of jobs.

    Args:
        adapters: The adapters of the worker, in their order.
    """

    def __init__(self, adapters: Sequence[LoraScale]) -> None:
        self._defaults = tuple(adapter.scale for adapter in adapters)
        self._places = adapter_places(adapters)
        self._names = ", ".join(f"{number} ({each.name})" for number, each in enumerate(adapters)) or "none"

    def resolve(self, lora: Mapping[str, float] | None) -> tuple[float, ...] | None:
        """Return the scale of each adapter. None: the scales of the worker.

        Args:
            lora: Scales by the numbers or the names of adapters. Adapters that it does not name have the scale 0.

        Raises:
            JobRejected: The worker has no such adapter.
        """
        if lora is None:
            return None
        scales = [0.0] * len(self._defaults)
        for name, scale in lora.items():
            place = self._places.get(name)
            if place is None:
                message = f"lora: this worker has no adapter {name!r}; its adapters are: {self._names}"
                raise JobRejected(ErrorCode.INVALID_REQUEST, message)
            scales[place] = scale
        return None if tuple(scales) == self._defaults else tuple(scales)
