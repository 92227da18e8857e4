"""A sampler whose grammar forces tokens, and what tests of forced tokens need beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.job import Job
from llamaq.worker.core.slot import Slot
from llamaq.worker.testing import (
    FakeEngine,
    GreedySampler,
    ManualClock,
    make_memory,
    make_scheduler,
    run_tick,
)

PERIOD = 9


class ForcingSampler(GreedySampler):
    """A sampler whose grammar forces the tokens at some positions of the output.

    Args:
        n_free: Number of tokens in each `PERIOD` that are sampled. The others are forced.
        knows: Whether `prepare` has always found all forced tokens.
    """

    can_prepare = True

    def __init__(self, n_free: int = 3, *, knows: bool = True) -> None:
        super().__init__()
        self._n_free = n_free
        self._knows = knows
        self.n_sampled = 0

    def _forced_at(self, position: int) -> int | None:
        return ord("A") + position % 26 if position % PERIOD >= self._n_free else None

    def forced_tokens(self, history: Sequence[int], n_prompt: int) -> Sequence[int]:
        position = len(history) - n_prompt
        tokens: list[int] = []
        while self._knows and len(tokens) < 16 and (token := self._forced_at(position + len(tokens))) is not None:
            tokens.append(token)
        return tokens

    def sample(
        self, logits: npt.NDArray[np.float32], history: Sequence[int], n_prompt: int, drawn: int | None = None
    ) -> int:
        self.n_sampled += 1
        forced = self._forced_at(len(history) - n_prompt)
        return super().sample(logits, history, n_prompt, drawn) if forced is None else forced


class TimedEngine(FakeEngine):
    """Advances a clock by the time of each batch.

    Args:
        build_s: How much longer a batch takes if the last one had another number of tokens. A batch takes 10 ms.
    """

    def __init__(self, clock: ManualClock, build_s: float) -> None:
        super().__init__(n_ctx=4000, n_batch=64, n_seq_max=8)
        self._clock = clock
        self._build_s = build_s

    def run(self, batch: Batch) -> list[SlotResult]:
        is_alike = self.batches and self.batches[-1].n_tokens == batch.n_tokens
        self._clock.now_s += 0.010 + (0.0 if is_alike else self._build_s)
        return super().run(batch)


def decoding_slot(job: Job) -> Slot:
    """Return a slot whose job has generated its first token."""
    engine = FakeEngine(n_ctx=600, n_seq_max=4)
    memory = make_memory(engine, n_slots=1)
    scheduler = make_scheduler(engine, memory)
    scheduler.submit(job)
    run_tick(scheduler, engine)
    return memory.slots[0]
