"""Ticks of an `Engine` with a real model, planned without a scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from llamaq.common.errors import JobRejected
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.slot import Run, Slot, SlotState
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.load_options import ContextOptions
from llamaq.worker.testing import make_job

OPTIONS = ContextOptions(n_ctx=1024, n_batch=128, n_ubatch=32, n_seq_max=8, n_threads=1, n_threads_batch=1)
CHUNK = 23
NOISE = 0.05
"""Upper bound on how much the shape of a batch changes logits, as a share of their standard deviation."""


class Greedy:
    """Samples the token with the largest logit, and records the gap to the second largest.

    The gaps are in standard deviations of the logits.
    """

    logprobs = draw_probability = None
    checks_logits = False

    def __init__(self) -> None:
        self.gaps: list[float] = []

    def sample(
        self, logits: npt.NDArray[np.float32], history: Sequence[int], n_prompt: int, drawn: int | None = None
    ) -> int:
        assert not logits[:0].flags.owndata
        second, first = np.partition(logits, -2)[-2:]
        self.gaps.append(float((first - second) / logits.std()))
        return int(logits.argmax())

    def close(self) -> None:
        pass


def prefill_slot(index: int, prompt: Sequence[int], sampler: Greedy | None = None) -> Slot:
    """Return a slot in PREFILL whose sequence has the id `index`."""
    job = make_job(prompt, sampler=sampler or Greedy())  # type: ignore[arg-type]
    return Slot(index, SlotState.PREFILL, Run(job, index, list(prompt)))


def prompt(n: int, seed: int, n_vocab: int = 500) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, n_vocab, n).tolist()
    return tokens


def plan_batch(slots: Iterable[Slot], budget: int) -> Batch:
    """Return a batch of at most `budget` tokens: all decode tokens, then prefill chunks."""
    slots = list(slots)
    decode = tuple(DecodeToken(slot) for slot in slots if slot.state is SlotState.DECODE)
    chunks, n_left = [], budget - len(decode)
    for slot in slots:
        if slot.state is SlotState.PREFILL and n_left:
            chunks.append(PrefillChunk(slot, min(n_left, CHUNK, slot.n_pending)))
            n_left -= chunks[-1].n_tokens
    return Batch(decode, tuple(chunks))


def run_tick(engine: Engine, slots: Iterable[Slot]) -> dict[int, JobRejected]:
    """Run one batch of all slots, and return the errors by slot index."""
    errors = {}
    for result in engine.run(plan_batch(slots, engine.context.n_batch)):
        run = result.slot.active
        run.n_past = result.n_past
        if result.error is not None:
            errors[result.slot.index] = result.error
        elif result.sampled:
            run.tokens += [sampled.token for sampled in result.sampled]
            result.slot.state = SlotState.DECODE
        elif run.n_pending > 1:
            result.slot.state = SlotState.PREFILL
    return errors


def generated(slot: Slot) -> list[int]:
    return slot.active.tokens[slot.active.n_prompt :]


def generate(engine: Engine, slots: Sequence[Slot], n: int) -> dict[int, JobRejected]:
    """Run until every slot has `n` tokens or an error. Then remove the sequences, and return the errors."""
    errors: dict[int, JobRejected] = {}
    for _ in range(50 * n):
        waiting = [slot for slot in slots if slot.index not in errors and len(generated(slot)) < n]
        if not waiting:
            break
        errors |= run_tick(engine, waiting)
    else:
        raise AssertionError("no progress")
    for slot in slots:
        engine.sequences.remove(slot.active.seq_id)
    return errors


def assert_equal_output(slot: Slot, expected_slot: Slot) -> None:
    """Assert that two slots have the same tokens up to the first difference where the gap was below `NOISE`."""
    gaps = expected_slot.active.job.sampler.gaps  # type: ignore[attr-defined]
    for index, (token, expected) in enumerate(zip(generated(slot), generated(expected_slot), strict=True)):
        if token != expected:
            assert gaps[index] < NOISE, f"token {index} differs with a gap of {gaps[index]:.3f}"
            break


def generate_alone(engine: Engine, tokens: Sequence[int], n: int) -> Slot:
    slot = prefill_slot(0, tokens)
    assert not generate(engine, [slot], n)
    return slot
