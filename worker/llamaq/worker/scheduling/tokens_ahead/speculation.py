"""What both kinds of speculation share: the acceptance of drafts, and the times of ticks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf
from typing import ClassVar

from llamaq.worker.core.batch import Batch
from llamaq.worker.core.draft import Draft, Drafting
from llamaq.worker.core.draft_acceptance import DraftAcceptance
from llamaq.worker.core.slot import Run
from llamaq.worker.scheduling.tokens_ahead.decode_times import DecodeTimes

FIRST_PROBABILITY = 0.6
"""The estimated acceptance of a draft token before the first draft of a worker."""
WORKER_DECAY = 0.97
"""The `DECAY` of the estimates over all jobs of the worker. The estimate of a new job begins with the worker's."""
TRIAL_AFTER = 128
"""Largest number of ticks between two trials, while drafts promise no gain."""
SEARCHES_PER_TICK, MAX_UNSEARCHED = 4, 16
"""After `SEARCHES_PER_TICK` searches in a row that found no draft, a tick without a search follows each search. After
twice as many, two such ticks follow, and so on up to `MAX_UNSEARCHED`. So texts that do not repeat themselves are
searched less often, and a draft is found at most `MAX_UNSEARCHED` ticks late."""


class Speculation(ABC):
    """Decides which drafts a tick verifies.

    A draft costs time whether its tokens are accepted or not. So a draft is verified only if it promises more tokens
    per second, judged by the acceptance of the earlier drafts of its job and by the measured times of ticks. From time
    to time, a draft that promises no gain is verified as a trial, because the text may have changed. The acceptance is
    estimated for each grade of drafts (`Draft.grade`) separately.

    Args:
        end_tokens: The model's end-of-generation tokens. A draft ends before such a token: the job may end there.
        max_tokens: Largest number of draft tokens in a tick.

    Threads: while the engine thread adds drafts to repeated ticks, another thread may call `record_tick` for earlier
    ones of these ticks. The engine thread makes all other calls.

    Attributes:
        needs_plan: Whether drafts are found only with a plan. If not, they are added to repeated ticks too.
    """

    needs_plan: ClassVar[bool]

    def __init__(self, end_tokens: frozenset[int], max_tokens: int) -> None:
        self._end_tokens = end_tokens
        self._max_tokens = max_tokens
        self._times = DecodeTimes()
        self._acceptance: dict[int, DraftAcceptance] = {}
        """Maps each grade to the acceptance of the drafts of all jobs."""
        self._n_without = 0
        """Number of searches in a row without a draft, since the last prompt."""

    def add_drafts(self, batch: Batch, room: int, limit_s: float) -> Batch:
        """Return the batch with the drafts that promise a gain.

        Args:
            batch: The batch of the strategy.
            room: Largest number of draft tokens: the batch and the KV memory have room for no more.
            limit_s: Longest time of a tick with drafts, in seconds.
        """
        batch = self._with_drafts(batch, room, limit_s)
        self._n_without = 0 if batch.has_draft_work or batch.prefill else self._n_without + 1
        return batch

    @property
    def n_unsearched(self) -> int:
        """Number of ticks before the next search for drafts. 0 after a search that found one."""
        return min(self._n_without // SEARCHES_PER_TICK, MAX_UNSEARCHED)

    @abstractmethod
    def _with_drafts(self, batch: Batch, room: int, limit_s: float) -> Batch:
        """Return the batch with drafts, or with a plan for the draft model; see `add_drafts`."""

    def record_tick(self, batch: Batch, seconds: float) -> None:
        """Learn from the time of a tick."""
        if batch and not batch.n_prefill and not batch.n_forced:
            self._times.record(batch.n_decode, batch.n_drafted, seconds)

    def record_draft(self, drafting: Drafting, draft: Draft, n_accepted: int) -> None:
        """Record the outcome of a draft that was verified. A place without a probable token counts as not accepted."""
        drafting.n_drafted += len(draft)
        drafting.n_accepted += n_accepted
        overall = self._overall(draft.grade)
        own = drafting.acceptance.setdefault(draft.grade, DraftAcceptance(overall.probability))
        for acceptance in (own, overall):
            acceptance.record(draft.n_places, n_accepted)

    def _n_max(self, run: Run) -> int:
        """Return the largest number of draft tokens of a run, below 1 if it generates its last token now."""
        drafting = run.job.drafting
        return 0 if drafting is None else min(drafting.n_max, run.max_length - len(run.tokens) - 1)

    def _probability(self, drafting: Drafting, grade: int) -> float:
        """Return the estimated acceptance of a job's next draft of a grade. Before the first: the worker's estimate."""
        return (drafting.acceptance.get(grade) or self._overall(grade)).probability

    def _overall(self, grade: int) -> DraftAcceptance:
        if grade not in self._acceptance:
            self._acceptance[grade] = DraftAcceptance(FIRST_PROBABILITY, WORKER_DECAY)
        return self._acceptance[grade]


def n_within(seconds: float, token_s: float) -> float:
    """Return how many tokens take at most `seconds`, if each takes `token_s`."""
    if seconds < 0:
        return 0
    return seconds // token_s if token_s and seconds < inf else inf
