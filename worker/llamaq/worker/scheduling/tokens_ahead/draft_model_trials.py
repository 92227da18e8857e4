"""Decides when a slot gets a trial: a short draft of the draft model, although no draft promises a gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llamaq.worker.core.slot import Slot
from llamaq.worker.scheduling.tokens_ahead.speculation import TRIAL_AFTER

FIRST_TRIAL_SHARE, TRIAL_SHARE = 0.05, 0.01
"""Upper bounds on the time of a trial, as a share of the time since the start of the worker, and since the last trial.
"""


class DraftModelTrials:
    """Chooses the slots of trials, one after the other.

    A trial belongs to one run. If this run lacks many tokens, the draft model computes them over several ticks, and the
    trial ends when the run has a draft.
    """

    def __init__(self) -> None:
        self._current: int | None = None
        """Admission number of the run that gets a trial. None: no trial has begun."""
        self._had_draft = False
        """Whether the draft model has drafted for any run."""
        self._n_ticks, self._seconds = 0, 0.0
        """Number of ticks since the start of the last trial, and their time."""

    def record_tick(self, seconds: float) -> None:
        """Count a tick, and its time."""
        self._n_ticks += 1
        self._seconds += seconds

    def record_plan(self, *, has_drafts: bool, is_empty: bool) -> None:
        """Record the plan of the draft model. A trial ends when it has a draft, or cannot have one.

        Args:
            has_drafts: Whether the plan has drafts.
            is_empty: Whether the plan has no work for any slot.
        """
        self._had_draft |= has_drafts
        if has_drafts or is_empty:
            self._current = None

    def may_be_due(self, least_s: float) -> bool:
        """Return whether a trial may be due that takes at least `least_s` seconds."""
        return self._current is not None or self._is_affordable(least_s)

    def choose(self, missing: Mapping[Slot, int], trial_s: Callable[[int], float]) -> Slot | None:
        """Return the slot that gets a trial. None: no trial is due.

        Args:
            missing: The slots that can have a draft, and the number of tokens that the draft model must compute before.
            trial_s: Returns the time of a trial, in seconds, for a number of such tokens.
        """
        for slot in missing:
            if slot.active.admission_number == self._current:
                return slot
        self._current = None
        if not missing:
            return None
        slot = min(missing, key=missing.__getitem__)
        if not self._is_affordable(trial_s(missing[slot])):
            return None
        self._current = slot.active.admission_number
        self._n_ticks, self._seconds = 0, 0.0
        return slot

    def _is_affordable(self, trial_s: float) -> bool:
        """Return whether it is time for a trial that takes `trial_s` seconds."""
        if not self._had_draft:
            return trial_s <= FIRST_TRIAL_SHARE * self._seconds
        return self._n_ticks >= TRIAL_AFTER and trial_s <= TRIAL_SHARE * self._seconds
