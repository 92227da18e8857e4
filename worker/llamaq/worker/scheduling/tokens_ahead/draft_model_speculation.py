"""Speculation with a draft model: decides which slots it drafts for, and how many tokens, before it computes anything.

The draft model takes time before a draft can be verified: one step for each token of the draft, and the computation of
the tokens of the history that it has not computed yet (the missing tokens). So the lengths of the drafts are chosen
first, from the acceptance of earlier drafts. If a slot whose drafts promise a gain lacks many tokens, the draft model
computes them over several ticks.

While no draft promises a gain, one slot gets a short draft from time to time as a trial, so that a change of the texts
is noticed. Trials take little of the time (`DraftModelTrials`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from llamaq.common.protocol.output_params import MAX_DRAFT_TOKENS
from llamaq.worker.core.batch import Batch
from llamaq.worker.core.draft import Drafting
from llamaq.worker.core.draft_plan import STEP_TOKENS, DraftPlan, DraftWork
from llamaq.worker.core.slot import Slot
from llamaq.worker.scheduling.tokens_ahead.ahead_times import NO_TIMES, AheadTimes
from llamaq.worker.scheduling.tokens_ahead.draft_lengths import LEAST_GAIN, DraftOption, can_gain, choose_lengths
from llamaq.worker.scheduling.tokens_ahead.draft_model_times import DraftModelTimes
from llamaq.worker.scheduling.tokens_ahead.draft_model_trials import DraftModelTrials
from llamaq.worker.scheduling.tokens_ahead.draft_sequences import DraftSequences
from llamaq.worker.scheduling.tokens_ahead.speculation import Speculation, n_within

log = logging.getLogger(__name__)

GRADE = 0
"""The grade of all drafts of the model."""
TRIAL_TOKENS = 8
"""Number of tokens of a trial. On a CPU, a batch of two tokens takes much longer than one token, and each further token
adds little, so a shorter trial would find that drafts cannot gain."""
SHORT_TOKENS = 2
"""Largest number of tokens of a draft that measures how long a step takes."""
FIRST_MISSING, LEAST_MISSING = 32, 16
"""Number of missing tokens that are computed in a tick before their time is known, and the least number afterwards."""


class _ProposedLength(NamedTuple):
    """A draft that a slot may get, before its length is chosen."""

    slot: Slot
    drafting: Drafting
    n_max: int
    n_missing: int
    probability: float


class _Costs(NamedTuple):
    """The times of a tick, in seconds. None: not known."""

    n_decode: int
    plain_s: float
    """Time of the tick without drafts."""
    times: AheadTimes | None
    """Times to verify draft tokens."""
    step_s: float | None
    """Time of a step of the draft model, with a draft for each slot whose drafts are probable enough."""
    single_step_s: float | None
    """Time of a step with one draft."""
    is_step_new: bool
    """Whether `step_s` was measured in the last ticks."""
    missing_token_s: float | None
    """Time of a missing token."""

    def may_gain(self, probability: float) -> bool:
        """Return whether drafts can promise a gain if each token is accepted with at most this probability.

        This takes less time than to choose drafts. As long as a time is not known, only trials are made.
        """
        if self.times is None or self.step_s is None:
            return False
        return can_gain(self.n_decode, self.plain_s, self.times.least_token_s, self.step_s, probability)

    def trial_s(self, n_missing: int) -> float:
        """Return how long a trial takes for a slot. Times that are not known count as 0."""
        return self.missing_s(n_missing) + self.verify_s(TRIAL_TOKENS) + TRIAL_TOKENS * (self.single_step_s or 0.0)

    def verify_s(self, n_tokens: int) -> float:
        """Return how long it takes to verify draft tokens, 0 if it is not known."""
        return 0.0 if self.times is None else self.times.seconds(n_tokens)

    def missing_s(self, n_missing: int) -> float:
        """Return how long missing tokens take beyond those of the first step, 0 if it is not known."""
        return max(0, n_missing - STEP_TOKENS) * (self.missing_token_s or 0.0)


class DraftModelSpeculation(Speculation):
    """Plans the drafts of a draft model; see `Speculation`.

    Args:
        end_tokens: The model's end-of-generation tokens.
        max_tokens: Largest number of draft tokens in a tick.
        sequences: The sequences of the draft model.
        max_missing: Largest number of tokens in a batch of the draft model.
        measured: Measurements of the draft model. If empty, the first drafts measure how long it takes.
    """

    needs_plan = True

    def __init__(
        self,
        end_tokens: frozenset[int],
        max_tokens: int,
        sequences: DraftSequences,
        *,
        max_missing: int,
        measured: Sequence[DraftWork] = (),
    ) -> None:
        super().__init__(end_tokens, max_tokens)
        self._sequences = sequences
        self._max_missing = max_missing
        self._model_times = DraftModelTimes()
        for work in measured:
            self._model_times.record(work)
        self._draftings: dict[Slot, Drafting] = {}
        """The slots of the last plan."""
        self._has_failed = False
        self._is_reported = False
        """Whether the log has the measurements of the first trial."""
        self._trials = DraftModelTrials()

    def _with_drafts(self, batch: Batch, room: int, limit_s: float) -> Batch:
        """Return the batch with a plan for the draft model; see `Speculation.add_drafts`."""
        plain_s = None if self._has_failed else self._times.plain_s(batch.n_decode)
        if plain_s is None:
            return batch  # this tick measures it
        slots = [part.slot for part in batch.decode if self._n_max(part.slot.active) > 0 and not part.forced]
        costs, best = self._read_costs(slots, batch.n_decode, plain_s)
        may_gain = costs.may_gain(best)
        # The missing tokens of its slot can still delay the trial.
        if not may_gain and not self._trials.may_be_due(costs.trial_s(0)):
            return batch
        room, max_missing = self._budgets(costs, room, limit_s)
        if room <= 0 or max_missing <= 0:
            return batch
        proposals = [one for slot in slots if (one := self._propose_length(slot)) is not None]
        lengths = self._choose(proposals, room, costs, may_gain=may_gain)
        if not lengths:
            return batch
        plan = self._sequences.plan(lengths, [part.slot for part in batch.decode], max_missing)
        self._note_plan(plan, proposals)
        return replace(batch, draft_plan=plan) if plan else batch

    def _budgets(self, costs: _Costs, room: int, limit_s: float) -> tuple[int, int]:
        """Return how many draft tokens and how many missing tokens a tick may compute. Each gets half of the time."""
        budget_s = (limit_s - costs.plain_s) / 2
        token_s = (costs.step_s or 0.0) + (0.0 if costs.times is None else costs.times.largest_token_s)
        room = int(min(room, self._max_tokens, n_within(budget_s, token_s)))
        return room, self._n_missing_within(budget_s, costs)

    def _choose(
        self, proposals: Sequence[_ProposedLength], room: int, costs: _Costs, *, may_gain: bool
    ) -> Mapping[Slot, int]:
        """Return the lengths of the drafts that promise a gain. If there are none: of a trial, if one is due."""
        lengths = self._choose_drafts(proposals, room, costs) if may_gain else {}
        return lengths or self._choose_trial(proposals, room, costs)

    def _note_plan(self, plan: DraftPlan, proposals: Sequence[_ProposedLength]) -> None:
        """Remember which jobs the plan may draft for."""
        self._draftings = {one.slot: one.drafting for one in proposals}
        has_drafts = any(part.n_tokens for part in plan.parts)
        self._trials.record_plan(has_drafts=has_drafts, is_empty=not plan.parts)

    def record_tick(self, batch: Batch, seconds: float) -> None:
        """Learn from the time of a tick, and from the work of the draft model."""
        work = batch.draft_work
        if batch and not batch.n_prefill and not batch.n_forced:
            self._times.record(batch.n_decode, batch.n_drafted, max(0.0, seconds - work.seconds))
        self._model_times.record(work)
        self._trials.record_tick(seconds)
        if not batch.draft_plan:
            return
        self._sequences.record(batch)
        self._has_failed = work.has_failed
        if not self._is_reported and self._times.ahead_times(batch.n_decode) is not None:
            self._is_reported = True
            log.info("draft_model.measured %r", self)
        for part in batch.decode:
            if part.draft.stopped_early and not part.draft.tokens:  # the others were verified and recorded
                self.record_draft(self._draftings[part.slot], part.draft, 0)

    def _read_costs(self, slots: Sequence[Slot], n_decode: int, plain_s: float) -> tuple[_Costs, float]:
        """Return the times of a tick with drafts for these slots, and the largest estimated acceptance of a draft."""
        draftings = (slot.active.job.drafting for slot in slots)
        probabilities = [self._probability(drafting, GRADE) for drafting in draftings if drafting is not None]
        model_times, times = self._model_times, self._times.ahead_times(n_decode)
        least_s = 0.0 if times is None else times.least_token_s
        n_drafts = max(1, sum(can_gain(n_decode, plain_s, least_s, 0.0, one) for one in probabilities))
        costs = _Costs(
            n_decode,
            plain_s,
            times,
            step_s=model_times.step_s(n_drafts),
            single_step_s=model_times.step_s(1),
            is_step_new=model_times.is_new(n_drafts),
            missing_token_s=model_times.missing_token_s,
        )
        return costs, max(probabilities, default=0.0)

    def _propose_length(self, slot: Slot) -> _ProposedLength | None:
        """Return the largest draft of a slot. None: it cannot have one."""
        drafting, n_missing = slot.active.job.drafting, self._sequences.n_missing(slot)
        if drafting is None or n_missing is None:
            return None
        return _ProposedLength(slot, drafting, self._n_max(slot.active), n_missing, self._probability(drafting, GRADE))

    def _that_fit(self, proposals: Sequence[_ProposedLength]) -> list[_ProposedLength]:
        """Return the proposals of the slots that have cells in the draft model, all at once."""
        fitting = self._sequences.fitting({one.slot: one.n_missing for one in proposals})
        return [one for one in proposals if one.slot in fitting]

    def _choose_drafts(self, proposals: Sequence[_ProposedLength], room: int, costs: _Costs) -> Mapping[Slot, int]:
        """Return the lengths of the drafts that promise a gain. If the time of a step is old, they are short."""
        worthwhile = self._that_fit([one for one in proposals if self._may_gain(one, costs)])
        longest = MAX_DRAFT_TOKENS if costs.is_step_new else SHORT_TOKENS
        options = [DraftOption(min(longest, one.n_max), one.probability) for one in worthwhile]
        lengths = choose_lengths(
            options,
            costs.n_decode,
            costs.plain_s,
            costs.times or NO_TIMES,
            room,
            costs.step_s or 0.0,
        )
        return {one.slot: length for one, length in zip(worthwhile, lengths, strict=True) if length}

    def _may_gain(self, proposal: _ProposedLength, costs: _Costs) -> bool:
        """Return whether drafts of the slot may gain time. Other slots must not take its cells in the draft model."""
        least_s = (costs.times or NO_TIMES).least_token_s
        is_probable = can_gain(costs.n_decode, costs.plain_s, least_s, 0.0, proposal.probability)
        return is_probable and self._pays_off(proposal, costs)

    def _pays_off(self, proposal: _ProposedLength, costs: _Costs) -> bool:
        """Return whether the rest of the job may gain the time that its missing tokens take from all jobs."""
        run = proposal.slot.active
        rest_s = costs.plain_s * (run.max_length - len(run.tokens))
        return costs.missing_s(proposal.n_missing) * costs.n_decode <= (1 - 1 / LEAST_GAIN) * rest_s

    def _choose_trial(self, proposals: Sequence[_ProposedLength], room: int, costs: _Costs) -> Mapping[Slot, int]:
        """Return the slot and the length of a trial, if a trial is due or not complete."""
        possible = {one.slot: one.n_missing for one in proposals if self._sequences.has_room(one.slot)}
        slot = self._trials.choose(possible, costs.trial_s)
        return {one.slot: min(room, TRIAL_TOKENS, one.n_max) for one in proposals if one.slot is slot}

    def _n_missing_within(self, budget_s: float, costs: _Costs) -> int:
        """Return how many missing tokens a tick may compute. They take as long as a tick without drafts, at most."""
        token_s = costs.missing_token_s
        n_tokens = FIRST_MISSING if token_s is None else max(LEAST_MISSING, n_within(costs.plain_s, token_s))
        return int(min(self._max_missing, n_tokens, n_within(budget_s, token_s or 0.0)))

    def __repr__(self) -> str:
        return f"<DraftModelSpeculation {self._acceptance!r} {self._times!r} {self._model_times!r} {self._sequences!r}>"
