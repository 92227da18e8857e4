"""Speculation with drafts from the job's own text (`NgramDrafter`), which cost no time before they are verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from llamaq.worker.core.batch import Batch, DecodeToken
from llamaq.worker.core.draft import NO_DRAFT, Draft, Drafting
from llamaq.worker.core.finish_rules import is_end
from llamaq.worker.core.slot import Slot
from llamaq.worker.scheduling.tokens_ahead.ahead_times import NO_TIMES, AheadTimes
from llamaq.worker.scheduling.tokens_ahead.draft_lengths import DraftOption, can_gain, choose_lengths
from llamaq.worker.scheduling.tokens_ahead.speculation import TRIAL_AFTER, Speculation, n_within

FIRST_TOKENS = 4
"""Largest number of draft tokens in a tick that measures their time."""
N_FIRST = 2
"""Number of such ticks at the start of a worker. In the first one, llama.cpp prepares memory for such batches."""
FIRST_TRIAL_AFTER = 16
"""While the drafts of a grade promise no gain, one is tried after this number of ticks. The number doubles with each
trial, up to `TRIAL_AFTER`. It begins anew after a draft whose tokens were all accepted."""
GROWTH = 4
"""After a draft whose tokens were all accepted, the next draft of the job has at most this many times as many tokens.
After another draft, it has at most half as many as before, or as many as were accepted."""
TRIAL_TOKENS = 1
"""Largest number of tokens of a trial, and of the first draft of each grade of a job."""


class _ProposedDraft(NamedTuple):
    """A draft that the text of a job suggests, and the probability that its next token is accepted."""

    slot: Slot
    drafting: Drafting
    draft: Draft
    probability: float


class _Prediction(NamedTuple):
    """The predicted times of ticks with a certain number of decode tokens."""

    n_decode: int
    plain_s: float | None
    """The seconds of a tick without drafts. None: not known."""
    times: AheadTimes
    """The times of draft tokens."""
    longest: int
    """Largest number of draft tokens in a tick. It is small while too few ticks with drafts are measured."""
    is_measured: bool
    """Whether `times` come from more than a few ticks, and all of these had `n_decode` decode tokens."""


class NgramSpeculation(Speculation):
    """Verifies the drafts that the drafter of each job proposes; see `Speculation`."""

    needs_plan = False

    def __init__(self, end_tokens: frozenset[int], max_tokens: int) -> None:
        super().__init__(end_tokens, max_tokens)
        self._n_passed: dict[int, int] = {}
        """Maps each grade to the number of ticks since its last trial in which its drafts promised no gain."""
        self._trial_after: dict[int, int] = {}
        """Maps each grade to the number of such ticks before its next trial."""
        self._prediction = self._predict(1)
        """The last prediction. Another thread may replace it when it records a tick."""
        self._is_measuring = False
        """Whether a draft is verified whose time is the first one to be measured."""
        self._n_since_trial = 0
        """Number of ticks with drafts since the last trial, in which no draft promised a gain."""
        self._n_vain_trials = 0
        """Number of trials since a draft last promised a gain."""

    def _with_drafts(self, batch: Batch, room: int, limit_s: float) -> Batch:
        """Return the batch with drafts; see `add_drafts`."""
        if batch.n_decode != self._prediction.n_decode:  # never between repeated ticks
            self._prediction = self._predict(batch.n_decode)
        _, plain_s, times, longest, is_measured = self._prediction
        is_first = times is NO_TIMES
        if plain_s is None or (is_first and self._is_measuring):
            return batch  # this tick measures it, or the last one does
        room = int(min(room, longest, n_within(limit_s - plain_s, times.largest_token_s)))
        # If the times are not measured, a trial may show that they are shorter.
        if room <= 0 or (is_measured and not can_gain(batch.n_decode, plain_s, times.least_token_s)):
            return batch
        proposals = self._proposals(batch)
        if not proposals:
            return batch
        drafts = self._choose(proposals, room, batch.n_decode, plain_s, times)
        if not drafts:
            return batch
        self._is_measuring = is_first
        decode = tuple([part._replace(draft=drafts.get(part.slot, NO_DRAFT)) for part in batch.decode])
        return replace(batch, decode=decode)

    def record_tick(self, batch: Batch, seconds: float) -> None:
        """Learn from the time of a tick; see `Speculation.record_tick`."""
        super().record_tick(batch, seconds)
        if batch.n_drafts:
            self._is_measuring = False
        self._prediction = self._predict(batch.n_decode)

    def _predict(self, n_decode: int) -> _Prediction:
        """Predict the times of ticks with this number of decode tokens."""
        plain_s, times = self._times.plain_s(n_decode), self._times.ahead_times(n_decode)
        if times is None or self._times.n_ahead_ticks < N_FIRST:
            return _Prediction(n_decode, plain_s, NO_TIMES, min(FIRST_TOKENS, self._max_tokens), is_measured=False)
        return _Prediction(n_decode, plain_s, times, self._max_tokens, self._times.has_ahead_times(n_decode))

    def record_draft(self, drafting: Drafting, draft: Draft, n_accepted: int) -> None:
        """Record the outcome of a draft; see `Speculation.record_draft`."""
        super().record_draft(drafting, draft, n_accepted)
        if n_accepted == len(draft):
            self._trial_after.pop(draft.grade, None)
            drafting.longest = max(drafting.longest, GROWTH * n_accepted)
        else:
            drafting.longest = max(1, n_accepted, drafting.longest // 2)

    def _proposals(self, batch: Batch) -> list[_ProposedDraft]:
        return [proposal for part in batch.decode if (proposal := self._propose(part)) is not None]

    def _propose(self, part: DecodeToken) -> _ProposedDraft | None:
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
        ends = self._end_tokens
        n_before_end = sum(1 for _ in takewhile(lambda token: not is_end(run.job, token, ends), draft.tokens))
        if not n_before_end:
            return None
        n_tokens = min(n_before_end, drafting.longest if draft.grade in drafting.acceptance else TRIAL_TOKENS)
        return _ProposedDraft(slot, drafting, draft.first(n_tokens), self._probability(drafting, draft.grade))

    def _choose(
        self, proposals: Sequence[_ProposedDraft], room: int, n_decode: int, plain_s: float, times: AheadTimes
    ) -> dict[Slot, Draft]:
        """Return the parts of the proposed drafts that promise a gain. If there are none: a trial, if one is due."""
        options = [DraftOption(len(one.draft), one.probability) for one in proposals]
        lengths = choose_lengths(options, n_decode, plain_s, times, room)
        chosen = {one.slot: one.draft.first(length) for one, length in zip(proposals, lengths, strict=True) if length}
        if chosen:
            self._n_vain_trials = 0
        return chosen or self._try_one(proposals, room, n_decode)

    def _try_one(self, proposals: Sequence[_ProposedDraft], room: int, n_decode: int) -> dict[Slot, Draft]:
        """Return a trial of one job, the one with the fewest drafted tokens, if a trial is due.

        The first draft of each grade of a job is tried at once: its text may be of another kind than those of the jobs
        before. But a trial delays all streams of the tick. So with several streams, trials come in as many ticks as
        there are streams, and the longer no draft promises a gain, the fewer they are: on a CPU, draft tokens beside
        eight streams take as long as decode tokens.
        """
        self._n_since_trial += 1
        if self._n_since_trial <= min((n_decode - 1) * max(1, self._n_vain_trials), TRIAL_AFTER):
            self._pass({one.draft.grade for one in proposals})
            return {}
        candidates = [one for one in proposals if one.draft.grade not in one.drafting.acceptance]
        if not candidates:
            grades = {one.draft.grade for one in proposals}
            grade = next(filter(self._is_trial_due, grades), None)
            if grade is None:
                self._pass(grades)
                return {}
            self._n_passed[grade], self._trial_after[grade] = 0, min(2 * self._ticks_to_trial(grade), TRIAL_AFTER)
            candidates = [one for one in proposals if one.draft.grade == grade]
        self._n_since_trial = 0
        self._n_vain_trials += 1
        least = min(candidates, key=lambda one: one.drafting.n_drafted)
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
