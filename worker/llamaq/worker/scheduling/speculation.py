"""Adds drafts to the batch of a tick, where the measured acceptance and the measured times of ticks promise a gain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from llamaq.worker.core.batch import Batch, DecodeToken
from llamaq.worker.core.draft_acceptance import Acceptance, GradeRecord
from llamaq.worker.core.slot import Slot
from llamaq.worker.core.token_draft import NO_DRAFT, Draft, Drafting
from llamaq.worker.scheduling.decode_times import DecodeTimes
from llamaq.worker.scheduling.draft_lengths import Candidate, choose_lengths

FIRST_PROBABILITY = 0.5
"""The estimated acceptance before the first draft of a worker."""
WORKER_DECAY = 0.95
"""As `DECAY`, for the estimates of the worker, with which the estimates of its next jobs begin."""
RETRY_TOKENS = 1
"""Number of tokens of a draft that is tried although it promises no gain."""


class _Proposal(NamedTuple):
    slot: Slot
    draft: Draft
    record: GradeRecord


class Speculation:
    """Decides which drafts a tick verifies.

    A draft costs time whether its tokens are accepted or not, so it must promise more tokens per second. Its promise is
    the acceptance of the earlier drafts of its job. A draft that promises nothing is tried now and then with one token.

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

    def add_drafts(self, batch: Batch, room: int, limit_s: float) -> Batch:
        """Return the batch with the drafts that promise a gain.

        Args:
            batch: The batch of the strategy.
            room: Largest number of draft tokens: the batch and the KV memory have room for no more.
            limit_s: Longest time of a tick with drafts, in seconds.
        """
        n_decode, room = batch.n_decode, min(room, self._max_tokens)
        while room > 0 and self._times.seconds(n_decode + room) > limit_s:
            room -= 1
        if room <= 0:
            return batch
        proposals = [proposal for part in batch.decode if (proposal := self._propose(part.slot)) is not None]
        if not proposals:
            return batch
        drafts = self._choose(proposals, n_decode, room)
        decode = tuple(DecodeToken(part.slot, drafts.get(part.slot, NO_DRAFT)) for part in batch.decode)
        return Batch(decode, batch.prefill)

    def record_tick(self, batch: Batch, seconds: float) -> None:
        """Learn from the time of a tick."""
        if batch and not batch.n_prefill:
            self._times.record(batch.n_tokens, seconds)

    def record_draft(self, drafting: Drafting, draft: Draft, n_accepted: int) -> None:
        """Learn what became of a draft that was verified."""
        n_drafted = len(draft)
        drafting.n_drafted += n_drafted
        drafting.n_accepted += n_accepted
        record = self._record_of(drafting, draft.grade)
        record.acceptance.record(n_drafted, n_accepted)
        record.retries.record(n_accepted)
        self._acceptance[draft.grade].record(n_drafted, n_accepted)

    def _propose(self, slot: Slot) -> _Proposal | None:
        """Return the draft of a slot. None: it has none, or it generates its last token now."""
        run = slot.active
        drafting = run.job.drafting
        if drafting is None:
            return None
        n_max = min(drafting.n_max, run.job.max_length - len(run.tokens) - 1)
        if n_max < 1:
            return None
        draft = drafting.drafter.propose(run.tokens, n_max)
        n_before_end = sum(1 for _ in takewhile(lambda token: token not in self._end_tokens, draft.tokens))
        if not n_before_end:
            return None
        return _Proposal(slot, draft.first(n_before_end), self._record_of(drafting, draft.grade))

    def _choose(self, proposals: Sequence[_Proposal], n_decode: int, room: int) -> dict[Slot, Draft]:
        """Return the parts of the proposed drafts to verify."""
        candidates = [Candidate(len(one.draft), one.record.acceptance.probability) for one in proposals]
        lengths = choose_lengths(candidates, n_decode, self._times.seconds, room)
        n_left = room - sum(lengths)
        chosen = {}
        for (slot, draft, record), length in zip(proposals, lengths, strict=True):
            if length:
                chosen[slot] = draft.first(length)
            elif n_left >= RETRY_TOKENS and record.retries.is_due():
                chosen[slot] = draft.first(RETRY_TOKENS)
                n_left -= RETRY_TOKENS
        return chosen

    def _record_of(self, drafting: Drafting, grade: int) -> GradeRecord:
        """Return what became of the drafts of a job and a grade. A new record begins with the worker's estimate."""
        if grade not in drafting.grades:
            overall = self._acceptance.setdefault(grade, Acceptance(FIRST_PROBABILITY, WORKER_DECAY))
            drafting.grades[grade] = GradeRecord(Acceptance(overall.probability))
        return drafting.grades[grade]

    def __repr__(self) -> str:
        return f"<Speculation {self._acceptance!r} {self._times!r}>"
