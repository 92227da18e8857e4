"""Checks the batch of a strategy, so that a faulty strategy cannot harm the worker."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from llamaq.common.errors import InvalidSettings
from llamaq.worker.core.batch import Batch, PrefillChunk
from llamaq.worker.core.slot import Run, Slot
from llamaq.worker.scheduling.strategies.batch_strategies import (
    Balanced,
    BatchStrategy,
    DecodeMaximal,
    DraftLimit,
    PrefillPriority,
    TickTimeReader,
)
from llamaq.worker.scheduling.strategies.latency_target import LatencyTarget
from llamaq.worker.scheduling.strategies.plan_rules import PlanFault, check_plan
from llamaq.worker.scheduling.strategies.scored_tokens_limit import with_bounded_scores
from llamaq.worker.scheduling.strategies.tick_times import TickTime

log = logging.getLogger(__name__)

TRUSTED = (DecodeMaximal, PrefillPriority, Balanced, LatencyTarget)
"""The built-in strategies. Their batches obey all rules, so they are not checked in every tick."""


@dataclass(frozen=True, slots=True)
class TickLimits:
    """Upper bounds on the tokens of one tick."""

    budget: int
    """Upper bound on the number of tokens in the batch (`--n-batch`). At least the number of slots."""
    chunk_size: int
    """Upper bound on the number of prompt tokens of one slot in the batch (`--chunk-size`). At least 1."""
    scored_tokens: int = 64
    """Upper bound on the prompt tokens in the batch whose logits are computed for `prompt_logprobs`. At least 1."""

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise InvalidSettings(f"--chunk-size {self.chunk_size} must be at least 1")


class GuardedStrategy:
    """Gets each tick's batch from a strategy. If the batch breaks a rule, logs this and uses `DecodeMaximal` instead.

    Built-in strategies are not checked.

    Args:
        strategy: The strategy of the worker.
        limits: Upper bounds on the tokens of one tick.
    """

    def __init__(self, strategy: BatchStrategy, limits: TickLimits) -> None:
        self.limits = limits
        self.faults: Counter[PlanFault] = Counter()
        """Number of refused batches for each broken rule. Only the first refused batch for each rule is logged."""
        self._strategy = strategy
        self._is_trusted = type(strategy) in TRUSTED
        self._time_reader = strategy if isinstance(strategy, TickTimeReader) else None
        self._draft_limit = strategy if isinstance(strategy, DraftLimit) else None
        self._fallback = DecodeMaximal()

    @property
    def decodes_all(self) -> bool:
        """Whether a batch without prompts always has the next token of every running stream."""
        return self._is_trusted

    @property
    def has_draft_limit(self) -> bool:
        """Whether the strategy limits the time of ticks with drafts: it is a `DraftLimit`."""
        return self._draft_limit is not None

    def plan(self, slots: tuple[Slot, ...], queue_depth: int) -> Batch:
        """Return a batch that obeys all rules, even if the batch of the strategy does not."""
        batch = with_bounded_scores(self._checked_plan(slots, queue_depth), self.limits.scored_tokens)
        return _end_chunks_at_checkpoints(batch)

    def record_tick(self, batch: Batch, seconds: float) -> None:
        """Pass the time of a tick to the strategy, if it is a `TickTimeReader`. An exception is logged."""
        if self._time_reader is None:
            return
        n_ahead = batch.n_drafted + batch.n_forced
        tick = TickTime(batch.n_decode, batch.n_prefill, seconds, n_ahead, batch.draft_work.seconds)
        try:
            self._time_reader.record_tick(tick)
        except Exception as exc:  # noqa: BLE001 - a user's strategy may raise anything
            self._report(PlanFault.RAISED, exc)

    def draft_limit_s(self, slots: Sequence[Slot]) -> float:
        """Return the limit of the strategy: infinity if it has none, 0 after an exception, which is logged."""
        if self._draft_limit is None:
            return inf
        try:
            return float(self._draft_limit.draft_limit_s(slots))
        except Exception as exc:  # noqa: BLE001 - a user's strategy may raise anything
            self._report(PlanFault.RAISED, exc)
            return 0.0

    def _checked_plan(self, slots: tuple[Slot, ...], queue_depth: int) -> Batch:
        budget, chunk_size = self.limits.budget, self.limits.chunk_size
        if self._is_trusted:
            return self._strategy.build_batch(slots, budget, chunk_size, queue_depth=queue_depth)
        before = [_SlotCopy(slot) for slot in slots]
        batch = Batch()
        fault: PlanFault | None = None
        cause: Exception | None = None
        try:
            batch = self._strategy.build_batch(slots, budget, chunk_size, queue_depth=queue_depth)
        except Exception as exc:  # noqa: BLE001 - a user's strategy may raise anything
            fault, cause = PlanFault.RAISED, exc
        changed = [copy.restore() for copy in before]  # a list: any() stops at the first changed slot
        if any(changed):
            fault = fault or PlanFault.CHANGED_SLOTS
        fault = fault or check_plan(batch, slots, budget)
        if fault is None:
            return batch
        self._report(fault, cause)
        return self._fallback.build_batch(slots, budget, chunk_size, queue_depth=queue_depth)

    def _report(self, fault: PlanFault, cause: Exception | None) -> None:
        self.faults[fault] += 1
        if self.faults[fault] == 1:
            log.error("strategy.refused fault=%s strategy=%r: %s", fault.name, self._strategy, fault, exc_info=cause)


def _end_chunks_at_checkpoints(batch: Batch) -> Batch:
    """Return the batch with each chunk shortened to the next checkpoint of its run."""
    if not any(chunk.slot.active.checkpoints for chunk in batch.prefill):
        return batch
    return Batch(batch.decode, tuple(PrefillChunk(chunk.slot, _up_to_checkpoint(chunk)) for chunk in batch.prefill))


def _up_to_checkpoint(chunk: PrefillChunk) -> int:
    run = chunk.slot.active
    distances = (position - run.n_past for position in run.checkpoints if position > run.n_past)
    return min(chunk.n_tokens, next(distances, chunk.n_tokens))


class _SlotCopy:
    """A copy of a slot's state, made before a strategy reads the slot."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._state = slot.state
        self._run = slot.run
        self._n_past = slot.run.n_past if slot.run else 0
        self._n_tokens = len(slot.run.tokens) if slot.run else 0

    def restore(self) -> bool:
        """Restore the slot. Returns whether the strategy had changed the slot."""
        slot, run = self._slot, self._run
        changed = slot.state is not self._state or slot.run is not run
        slot.state, slot.run = self._state, run
        return changed if run is None else _restore_run(run, self._n_past, self._n_tokens) or changed


def _restore_run(run: Run, n_past: int, n_tokens: int) -> bool:
    changed = run.n_past != n_past or len(run.tokens) != n_tokens
    run.n_past = n_past
    del run.tokens[n_tokens:]
    return changed
