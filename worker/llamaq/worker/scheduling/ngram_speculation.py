"""Speculation with drafts from the job's own text (`NgramDrafter`), which cost no time before they are verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from llamaq.worker.core.batch import Batch, DecodeToken
from llamaq.worker.core.slot import Slot
from llamaq.worker.core.token_draft import NO_DRAFT, Draft, Drafting
from llamaq.worker.scheduling.draft_lengths import Candidate, can_gain, choose_lengths
from llamaq.worker.scheduling.draft_times import DraftTimes
from llamaq.worker.scheduling.speculation import TRIAL_AFTER, Speculation, n_within

FIRST_TOKENS = 4
"""Largest number of draft tokens in a tick that measures their time."""
N_FIRST = 2
"""Number of such ticks at the start of a worker. In the first one, llama.cpp prepares memory for such batches."""
FIRST_TRIAL_AFTER = 8
"""While the drafts of a grade promise no gain, one is tried after this number of ticks. The number doubles with each
trial, up to `TRIAL_AFTER`. It begins anew after a draft whose tokens were all accepted."""
TRIAL_TOKENS = 2
"""Largest number of tokens of a trial, and of the first draft of each grade of a job: other jobs may have raised the
estimate of the grade, but the text of this job may be of another kind."""
NO_TIMES = DraftTimes.constant(0.0)


class _Proposal(NamedTuple):
    slot: Slot
    drafting: Drafting
    draft: Draft
    probability: float


class NgramSpeculation(Speculation):
    """Verifies the drafts that the drafter of each job proposes; see `Speculation`."""

    def __init__(self, end_tokens: frozenset[int], max_tokens: int) -> None:
        super().__init__(end_tokens, max_tokens)
        self._n_passed: dict[int, int] = {}
        """Maps each grade to the number of ticks since its last trial in which its drafts promised no gain."""
        self._trial_after: dict[int, int] = {}
        """Maps each grade to the number of such ticks before its next trial."""
        self._plain_s: float | None = None
        """The time of a tick without drafts, as the last plan predicted it, in seconds. None: it was not known."""
        self._draft_times = NO_TIMES
        """The times of draft tokens, as the last plan predicted them."""

    def finds_none(self, batch: Batch) -> bool:
        """Search for drafts; see `Speculation.finds_none`."""
        n_decode, plain_s, times = batch.n_decode, self._plain_s, self._draft_times
        if plain_s is None:
            return False  # the time of the last tick is recorded before the next plan
        if can_gain(n_decode, plain_s, times.least_token_s):
            proposals = self._proposals(batch)
            if any(self._lengths(proposals, self._max_tokens, n_decode, plain_s, times)):
                return False
            grades = _grades(proposals)
            if any(map(self._is_trial_due, grades)):
                return False
            self._pass(grades)
        self._n_without += 1
        return True

    def _drafted(self, batch: Batch, room: int, limit_s: float) -> Batch:
        """Return the batch with drafts; see `add_drafts`."""
        n_decode = batch.n_decode
        self._plain_s = plain_s = self._times.plain_s(n_decode)
        times = self._times.draft_times(n_decode)
        if times is None or self._times.n_drafted_ticks < N_FIRST:
            room, times = min(room, FIRST_TOKENS), NO_TIMES
        self._draft_times = times
        if plain_s is None:
            return batch  # this tick measures it
        room = int(min(room, self._max_tokens, n_within(limit_s - plain_s, times.largest_token_s)))
        if room <= 0 or not can_gain(n_decode, plain_s, times.least_token_s):
            return batch
        proposals = self._proposals(batch)
        if not proposals:
            return batch
        drafts = self._choose(proposals, room, n_decode, plain_s, times)
        decode = tuple(part._replace(draft=drafts.get(part.slot, NO_DRAFT)) for part in batch.decode)
        return replace(batch, decode=decode)

    def record_draft(self, drafting: Drafting, draft: Draft, n_accepted: int) -> None:
        """Record the outcome of a draft; see `Speculation.record_draft`."""
        super().record_draft(drafting, draft, n_accepted)
        if n_accepted == len(draft):
            self._trial_after.pop(draft.grade, None)

    def _proposals(self, batch: Batch) -> list[_Proposal]:
        return [proposal for part in batch.decode if (proposal := self._propose(part)) is not None]

    def _propose(self, part: DecodeToken) -> _Proposal | None:
        """Return the draft of a slot.

        Returns:
            None if there is no draft, if the job generates its last token now, or if its next tokens are forced.
        """
        slot, run = part.slot, part.slot.active
        drafting, n_max = run.job.drafting, self._n_max(run)
        if drafting is None or drafting.drafter is None or n_max < 1 or part.forced:
            return None
        draft = drafting.drafter.propose(run.tokens, n_max)
        if not draft.tokens:
            return None
        n_before_end = sum(1 for _ in takewhile(lambda token: token not in self._end_tokens, draft.tokens))
        if not n_before_end:
            return None
        n_tokens = n_before_end if draft.grade in drafting.acceptance else min(n_before_end, TRIAL_TOKENS)
        return _Proposal(slot, drafting, draft.first(n_tokens), self._probability(drafting, draft.grade))

    def _choose(
        self, proposals: Sequence[_Proposal], room: int, n_decode: int, plain_s: float, times: DraftTimes
    ) -> dict[Slot, Draft]:
        """Return the parts of the proposed drafts to verify."""
        lengths = self._lengths(proposals, room, n_decode, plain_s, times)
        chosen = {one.slot: one.draft.first(length) for one, length in zip(proposals, lengths, strict=True) if length}
        return chosen or self._try_one(proposals, room)

    def _lengths(
        self, proposals: Sequence[_Proposal], room: int, n_decode: int, plain_s: float, times: DraftTimes
    ) -> list[int]:
        """Return how many tokens of each proposed draft promise a gain."""
        candidates = [Candidate(len(one.draft), one.probability) for one in proposals]
        return choose_lengths(candidates, n_decode, plain_s, times, room)

    def _try_one(self, proposals: Sequence[_Proposal], room: int) -> dict[Slot, Draft]:
        """Return a trial of the job with the fewest drafted tokens, if a trial is due."""
        grades = _grades(proposals)
        grade = next(filter(self._is_trial_due, grades), None)
        if grade is None:
            self._pass(grades)
            return {}
        self._n_passed[grade], self._trial_after[grade] = 0, min(2 * self._ticks_to_trial(grade), TRIAL_AFTER)
        of_grade = [one for one in proposals if one.draft.grade == grade]
        least = min(of_grade, key=lambda one: one.drafting.n_drafted)
        return {least.slot: least.draft.first(min(TRIAL_TOKENS, room))}

    def _is_trial_due(self, grade: int) -> bool:
        """Whether a trial of this grade is due."""
        return self._n_passed.get(grade, 0) + 1 >= self._ticks_to_trial(grade)

    def _ticks_to_trial(self, grade: int) -> int:
        return self._trial_after.get(grade, FIRST_TRIAL_AFTER)

    def _pass(self, grades: Iterable[int]) -> None:
        """Count a tick with drafts of these grades, none of which is verified."""
        for grade in grades:
            self._n_passed[grade] = self._n_passed.get(grade, 0) + 1

    def __repr__(self) -> str:
        return f"<NgramSpeculation {self._acceptance!r} {self._times!r}>"


def _grades(proposals: Iterable[_Proposal]) -> set[int]:
    return {one.draft.grade for one in proposals}
