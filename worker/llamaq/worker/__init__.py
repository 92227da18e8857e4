"""The worker: runs jobs from the queue on llama.cpp.

This module exports the types for your own batch strategies and hooks:

    from llamaq.worker import Batch, DecodeMaximal, Slot

`llamaq.worker.testing` has fakes to test a strategy without a model.
"""

from __future__ import annotations

from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.slot import Run, Slot, SlotState
from llamaq.worker.engine_loop.telemetry import Hook
from llamaq.worker.scheduling.strategies.batch_strategies import (
    Balanced,
    BatchStrategy,
    DecodeMaximal,
    PrefillPriority,
    TickTimeReader,
    decode_tokens,
    prefill_chunks,
)
from llamaq.worker.scheduling.strategies.latency_target import LatencyTarget
from llamaq.worker.scheduling.strategies.tick_times import TickTime

__all__ = [
    "Balanced",
    "Batch",
    "BatchStrategy",
    "DecodeMaximal",
    "DecodeToken",
    "Hook",
    "LatencyTarget",
    "PrefillChunk",
    "PrefillPriority",
    "Run",
    "Slot",
    "SlotState",
    "TickTime",
    "TickTimeReader",
    "decode_tokens",
    "prefill_chunks",
]
