"""What runs on the GPU host.

Users who write a batch strategy or a hook import their types from here:

    from llamaq.worker import Batch, DecodeMaximal, Slot
"""

from __future__ import annotations

from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.slot import Slot, SlotState
from llamaq.worker.scheduling.batch_strategy import Balanced, BatchStrategy, DecodeMaximal, PrefillPriority

__all__ = [
    "Balanced",
    "Batch",
    "BatchStrategy",
    "DecodeMaximal",
    "DecodeToken",
    "PrefillChunk",
    "PrefillPriority",
    "Slot",
    "SlotState",
]
