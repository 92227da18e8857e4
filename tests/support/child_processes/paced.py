"""A strategy with a minimum time per tick, for a worker that a test starts: `LLAMAQ_BATCH_STRATEGY=paced:Paced`.

A tick takes TICK_S seconds, 0.01 by default. So a job takes about as long on a fast machine as on a slow one. If
LINGER_TOKENS is set, a tick takes 0.2 seconds longer while a job with that many tokens runs, until the worker's folder
has the file `may-finish`. So no job ends before the test has disturbed it, even if the test is stopped for a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamaq.worker import Batch, DecodeMaximal, Slot

TICK_S = float(os.environ.get("TICK_S", "0.01"))
LINGER_TOKENS = int(os.environ.get("LINGER_TOKENS", "1000000"))
MAY_FINISH = Path("may-finish")


class Paced(DecodeMaximal):
    def build_batch(self, slots: Sequence[Slot], *args: Any, **kwargs: Any) -> Batch:
        time.sleep(TICK_S)
        longest = max((slot.run.n_generated for slot in slots if slot.run is not None), default=0)
        if longest >= LINGER_TOKENS and not MAY_FINISH.exists():
            time.sleep(0.2)
        return super().build_batch(slots, *args, **kwargs)
