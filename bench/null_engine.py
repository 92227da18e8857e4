"""Makes the engine of a worker compute nothing: each job gets the same token again and again, at once.

A worker imports this module with `--batch-strategy null_engine:DecodeMaximal`, which is the default strategy. All other
parts of the worker are the real ones.
"""

from __future__ import annotations

from llamaq.worker.core.batch import Batch, DecodeToken, SampledToken, SlotResult
from llamaq.worker.engine.engine import Engine
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal

__all__ = ["DecodeMaximal"]
TOKEN = SampledToken(100)


def _run(_: Engine, batch: Batch) -> list[SlotResult]:
    return [
        SlotResult(
            part.slot,
            part.slot.active.n_past + part.n_tokens,
            (TOKEN,) if isinstance(part, DecodeToken) or part.is_last else (),
        )
        for part in batch.parts
    ]


Engine.run = _run  # type: ignore[method-assign, assignment]
