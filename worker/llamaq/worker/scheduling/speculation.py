"""Adds drafts to the batch of a tick, where the measured acceptance and the measured times of ticks promise a gain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import NamedTuple

from llamaq.worker.core.batch import Batch, DecodeToken
from llamaq.worker.core.draft_acceptance import Acceptance
from llamaq.worker.core.slot import Run, Slot
from llamaq.worker.core.token_draft import NO_DRAFT, Draft, Drafting
from llamaq.worker.scheduling.decode_times import DecodeTimes
from llamaq.worker.scheduling.draft_lengths import Candidate, can_gain, choose_lengths

FIRST_PROBABILITY = 0.6
"""The estimated acceptance of a draft token before the first draft of a worker."""
WORKER_DECAY = 0.97
"""The `DECAY` of the estimates over all jobs of the worker. The estimate of a new job begins with the worker's."""
FIRST_TOKENS = 4
"""Largest number of draft tokens in a tick that measures their time."""
N_FIRST = 2
"""Number of such ticks at the start of a worker. In the first one, llama.cpp prepares memory for such batches."""
FIRST_RETRY, RETRY_AFTER = 8, 128
"""While the drafts of a grade promise no gain, one is tried after this number of ticks, because the text may have
changed. The number begins with `FIRST_RETRY` and doubles with each trial, up to `RETRY_AFTER`. It begins anew after a
draft whose tokens were all accepted."""
TRIAL_TOKENS = 2
"""Largest number of tokens of a trial, and of the first draft of each grade of a job: other jobs may have raised the
estimate of the grade, but the text of this job may be of another kind."""
SEARCHES_PER_TICK, MAX_UNSEARCHED = 4, 16
"""Ticks without a search come between two searches: one for each `SEARCHES_PER_TICK` searches in a row that found no
draft, at most `MAX_UNSEARCHED`. So texts that do not repeat themselves are searched less often, and a draft is found at
most `MAX_UNSEARCHED` ticks late."""


class _Proposal(NamedTuple):
    slot: Slot
    drafting: Drafting
    draft: Draft
    probability: float


class Speculation:
    """Decides which drafts a tick verifies.

    A draft costs time whether its tokens are accepted or not. So a draft is verified only if it promises more tokens
    per second, judged by the acceptance of the earlier drafts of its job and by the measured times of ticks. From time
    to time, a draft that promises no gain is verified as a trial. The acceptance is estimated for each grade of drafts
    (`Draft.grade`) separately.

    Args:
        end_tokens: The model's end-of-generation tokens. A draft ends before such a token: the job may end there.
        max_tokens: Largest number of draft tokens in a tick.
    """

    def __init__(self, end_tokens: frozenset[int], max_tokens: int) -> None:
        self._end_tokens = end_tokens
        self._max_tokens = max_tokens
        self._times = DecodeTimes()
        self._acceptance: dict[int, Acceptance] = {}
        """Maps each grade to the acceptance of the drafts of all jobs."""
        self._n_passed: dict[int, int] = {}
        """Maps each grade to the number of ticks since its last trial in which its drafts promised no gain."""
        self._retry_after: dict[int, int] = {}
        """Maps each grade to the number of such ticks before its next trial."""
        self._n_without = 0
        """Number of searches in a row without a draft, since the last prompt."""
        self._plain_s: float | None = None
        """The time of a tick without drafts, as the last plan predicted it, in seconds. None: it was not known."""
        self._token_s = 0.0
        """The time of a draft token, as the last plan predicted it, in seconds."""

    def add_drafts(self, batch: Batch, room: int, limit_s: float) -> Batch:
        """Return the batch with the drafts that promise a gain.

        Args:
            batch: The batch of the strategy.
            room: Largest number of draft tokens: the batch and the KV memory have room for no more.
            limit_s: Longest time of a tick with drafts, in seconds.
        """
        drafted = self._drafted(batch, room, limit_s)
        self._n_without = 0 if drafted.has_draft_work or drafted.prefill else self._n_without + 1
        return drafted

    @property
    def n_unsearched(self) -> int:
        """Number of ticks before the next search for drafts, after one that found none."""
        return min(self._n_without // SEARCHES_PER_TICK, MAX_UNSEARCHED)

    def finds_none(self, batch: Batch) -> bool:
        """Search for drafts. Return whether the next plan would add no draft to the decode tokens of `batch`.

        This takes less time than a plan. If it returns True, it counts as a plan without a draft. The predicted times
        of the last plan are used, because another thread may record a tick now.

        Args:
            batch: The batch of the last plan.
        """
        n_decode, plain_s, token_s = batch.n_decode, self._plain_s, self._token_s
        if plain_s is None:
            return False  # the time of the last tick is recorded before the next plan
        if can_gain(n_decode, plain_s, token_s):
            proposals = self._proposals(batch)
            if any(self._lengths(proposals, self._max_tokens, n_decode, plain_s, token_s)):
                return False
            grades = _grades(proposals)
            if any(map(self._is_retried, grades)):
                return False
            self._pass(grades)
        self._n_without += 1
        return True

    def _drafted(self, batch: Batch, room: int, limit_s: float) -> Batch:
        """Return the batch with drafts; see `add_drafts`."""
        n_decode = batch.n_decode
        self._plain_s = plain_s = self._times.plain_s(n_decode)
        token_s = self._times.draft_token_s
        if token_s is None or self._times.n_drafted_ticks < N_FIRST:
            room, token_s = min(room, FIRST_TOKENS), 0.0
        self._token_s = token_s
        if plain_s is None:
            return batch  # this tick measures it
        room = int(min(room, self._max_tokens, n_within(limit_s - plain_s, token_s)))
        if room <= 0 or not can_gain(n_decode, plain_s, token_s):
            return batch
        proposals = self._proposals(batch)
        if not proposals:
            return batch
        drafts = self._choose(proposals, room, n_decode, plain_s, token_s)
        decode = tuple(part._replace(draft=drafts.get(part.slot, NO_DRAFT)) for part in batch.decode)
        return replace(batch, decode=decode)

    def record_tick(self, batch: Batch, seconds: float) -> None:
        """Learn from the time of a tick."""
        if batch and not batch.n_prefill and not batch.n_forced:
            self._times.record(batch.n_decode, batch.n_drafted, seconds)

    def record_draft(self, drafting: Drafting, draft: Draft, n_accepted: int) -> None:
        """Record the outcome of a draft that was verified. A place without a probable token counts as not accepted."""
        drafting.n_drafted += len(draft)
        drafting.n_accepted += n_accepted
        overall = self._overall(draft.grade)
        own = drafting.acceptance.setdefault(draft.grade, Acceptance(overall.probability))
        for acceptance in (own, overall):
            acceptance.record(draft.n_places, n_accepted)
        if n_accepted == len(draft):
            self._retry_after.pop(draft.grade, None)

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

    def _n_max(self, run: Run) -> int:
        """Return the largest number of draft tokens of a run, below 1 if it generates its last token now."""
        drafting = run.job.drafting
        return 0 if drafting is None else min(drafting.n_max, run.max_length - len(run.tokens) - 1)

    def _choose(
        self, proposals: Sequence[_Proposal], room: int, n_decode: int, plain_s: float, token_s: float
    ) -> dict[Slot, Draft]:
        """Return the parts of the proposed drafts to verify."""
        lengths = self._lengths(proposals, room, n_decode, plain_s, token_s)
        chosen = {one.slot: one.draft.first(length) for one, length in zip(proposals, lengths, strict=True) if length}
        return chosen or self._retry(proposals, room)

    def _lengths(
        self, proposals: Sequence[_Proposal], room: int, n_decode: int, plain_s: float, token_s: float
    ) -> list[int]:
        """Return how many tokens of each proposed draft promise a gain."""
        candidates = [Candidate(len(one.draft), one.probability) for one in proposals]
        return choose_lengths(candidates, n_decode, plain_s, token_s, room)

    def _retry(self, proposals: Sequence[_Proposal], room: int) -> dict[Slot, Draft]:
        """Return a trial of the job with the fewest drafted tokens, if a trial is due."""
        grades = _grades(proposals)
        grade = next(filter(self._is_retried, grades), None)
        if grade is None:
            self._pass(grades)
            return {}
        self._n_passed[grade], self._retry_after[grade] = 0, min(2 * self._ticks_to_retry(grade), RETRY_AFTER)
        of_grade = [one for one in proposals if one.draft.grade == grade]
        least = min(of_grade, key=lambda one: one.drafting.n_drafted)
        return {least.slot: least.draft.first(min(TRIAL_TOKENS, room))}

    def _is_retried(self, grade: int) -> bool:
        """Whether a trial of this grade is due."""
        return self._n_passed.get(grade, 0) + 1 >= self._ticks_to_retry(grade)

    def _ticks_to_retry(self, grade: int) -> int:
        return self._retry_after.get(grade, FIRST_RETRY)

    def _pass(self, grades: Iterable[int]) -> None:
        """Count a tick with drafts of these grades, none of which is verified."""
        for grade in grades:
            self._n_passed[grade] = self._n_passed.get(grade, 0) + 1

    def _probability(self, drafting: Drafting, grade: int) -> float:
        """Return the estimated acceptance of a job's next draft of a grade. Before the first: the worker's estimate."""
        return (drafting.acceptance.get(grade) or self._overall(grade)).probability

    def _overall(self, grade: int) -> Acceptance:
        if grade not in self._acceptance:
            self._acceptance[grade] = Acceptance(FIRST_PROBABILITY, WORKER_DECAY)
        return self._acceptance[grade]

    def __repr__(self) -> str:
        return f"<Speculation {self._acceptance!r} {self._times!r}>"


def _grades(proposals: Iterable[_Proposal]) -> set[int]:
    return {one.draft.grade for one in proposals}


def n_within(seconds: float, token_s: float) -> float:
    """Return how many tokens take at most `seconds`, if each takes `token_s`."""
    if seconds < 0:
        return 0
    return seconds // token_s if token_s and seconds < inf else inf
