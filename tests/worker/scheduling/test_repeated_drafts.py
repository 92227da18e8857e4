"""Ticks with drafts are repeated too, and the tokens are as without drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from tests.support.oracle import Oracle
from tests.support.repeated_ticks_rig import MANY, PROMPT, RepeatedTicksRig, cached_tokens, letters, run_all

from llamaq.common.errors import EngineError
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.worker.core.batch import Batch, DecodeToken
from llamaq.worker.core.draft import Draft, Drafting
from llamaq.worker.core.draft_plan import DraftWork
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded
from llamaq.worker.scheduling.tokens_ahead.draft_model_speculation import DraftModelSpeculation
from llamaq.worker.scheduling.tokens_ahead.draft_sequences import DraftSequences
from llamaq.worker.scheduling.tokens_ahead.speculation import MAX_UNSEARCHED, SEARCHES_PER_TICK
from llamaq.worker.testing import (
    ByteVocab,
    GreedySampler,
    make_job,
    next_letter,
)


class LateDrafter:
    """Drafts one token, from a number of tokens on."""

    def __init__(self, n_before: int) -> None:
        self.n_before = n_before
        self.searched: list[int] = []

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        self.searched.append(len(history) - len(PROMPT))
        return Draft((next_letter(history),)[:n_max]) if len(history) - len(PROMPT) >= self.n_before else Draft()


def gaps(positions: Iterable[int]) -> list[int]:
    """Return the differences of positions that follow each other."""
    return [later - earlier for earlier, later in pairwise(positions)]


def test_texts_are_searched_for_drafts_the_less_often_the_longer_none_was_found() -> None:
    drafter = LateDrafter(800)
    job = make_job(max_tokens=840, drafting=Drafting(drafter, 4))
    rig = RepeatedTicksRig(job, make_job(max_tokens=840), draft_tokens=8)
    rig.prefill()
    assert rig.tick(n_late=1) > 810, "neither a search nor a draft needs a plan"
    run_all(rig)
    n_first = 4 * SEARCHES_PER_TICK
    expected = [at // SEARCHES_PER_TICK + 1 for at in range(3, n_first + 3)]
    assert gaps(drafter.searched[: n_first + 1]) == expected
    assert max(gaps(drafter.searched)) == MAX_UNSEARCHED + 1
    after = [n_tokens for n_tokens in drafter.searched if n_tokens >= 800]
    assert len(after) > 5
    assert set(gaps(after[4:12])) == {2}, "as soon as the time of drafts is known, each tick has one that is accepted"
    assert rig.tokens(job) == letters(840)


def test_after_a_prompt_texts_are_searched_for_drafts_in_each_tick_again() -> None:
    drafter = LateDrafter(1000)
    rig = RepeatedTicksRig(make_job(max_tokens=300, drafting=Drafting(drafter, 4)), draft_tokens=8)
    rig.prefill()
    rig.tick(100, n_late=1)
    assert gaps(drafter.searched)[-1] > 3
    rig.scheduler.submit(make_job(max_tokens=100))
    rig.prefill()
    n_before = len(drafter.searched)
    rig.tick(20, n_late=1)
    expected = [at // SEARCHES_PER_TICK + 1 for at in range(3, 9)]
    assert gaps(drafter.searched[n_before:])[:6] == expected


def test_ticks_are_repeated_up_to_the_next_search_if_this_search_needs_a_plan() -> None:
    sequences = DraftSequences(2, n_cells=1000, n_vocab=ByteVocab.n_tokens, held_cells=0)
    slow = DraftWork(n_steps=1, n_step_drafts=1, steps_s=1.0)  # so slow that the draft model is not tried
    speculation = DraftModelSpeculation(ByteVocab.end_tokens, 8, sequences, max_missing=64, measured=[slow])
    rig = RepeatedTicksRig(make_job(max_tokens=90, drafting=Drafting(None, 4)), speculation=speculation)
    rig.prefill()
    n_searches = 5 * SEARCHES_PER_TICK
    assert [rig.tick() for _ in range(n_searches)] == [at // SEARCHES_PER_TICK for at in range(1, n_searches + 1)]


def drafting_job(max_tokens: int, wrong_at: int | None = None, **options: Any) -> Job:
    """Return a job whose drafts have at most four tokens."""
    return make_job(max_tokens=max_tokens, drafting=Drafting(Oracle(wrong_at=wrong_at), 4), **options)


@pytest.mark.parametrize("n_late", [1, 3, 6])
@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_ticks_with_drafts_are_repeated_and_tokens_that_are_not_accepted_leave_no_cells(
    wrong_at: int | None, n_late: int
) -> None:
    jobs = [drafting_job(60, wrong_at), drafting_job(60), make_job(max_tokens=60)]
    rig = RepeatedTicksRig(*jobs, n_slots=3, draft_tokens=12)
    rig.prefill()
    rig.tick(0)  # measures the time of a tick without drafts
    n_plans = 0
    while rig.scheduler.has_work:
        rig.tick(n_late=n_late)
        n_plans += 1
    assert n_plans < 12, "when a job has few tokens left, a draft could end it"
    assert sum(batch.n_drafts for batch in rig.engine.batches) > 4
    assert [rig.tokens(job) for job in jobs] == [letters(60)] * 3
    drafted = [rig.end(job).stats for job in jobs[:2]]
    assert sum(one.drafted_tokens or 0 for one in drafted) == sum(batch.n_drafted for batch in rig.engine.batches)
    assert drafted[1].accepted_tokens == drafted[1].drafted_tokens


def test_several_tokens_of_a_stream_with_stop_strings_need_a_plan() -> None:
    stop = bytes(letters(20)[18:]).decode()
    stopped, other = drafting_job(60, stop=[stop]), make_job(max_tokens=60)
    rig = RepeatedTicksRig(stopped, other, caches=True, draft_tokens=8)
    rig.prefill()
    while not any(isinstance(out, JobEnded) for out in rig.outputs):
        rig.tick()
    assert rig.tokens(stopped) == letters(20)
    assert rig.end(stopped).stats.generated_tokens == 20
    assert cached_tokens(rig) == [[*PROMPT, *letters(20)]] or cached_tokens(rig) == [[*PROMPT, *letters(19)]]


def test_a_batch_with_drafts_that_was_refused_is_computed_without_them() -> None:
    job = drafting_job(40)
    rig = RepeatedTicksRig(job, make_job(max_tokens=40), draft_tokens=8)
    rig.prefill()
    rig.tick(3, n_late=1)
    rig.engine.refuse()
    rig.tick(3, n_late=1)
    run_all(rig)
    stats = rig.end(job).stats
    assert rig.tokens(job) == letters(40)
    assert stats.accepted_tokens == stats.drafted_tokens


def test_several_tokens_of_a_stream_with_a_grammar_need_a_plan() -> None:
    job = drafting_job(40, sampler=PreparingSampler())
    rig = RepeatedTicksRig(job, draft_tokens=8)
    rig.prefill()
    while rig.scheduler.has_work:
        n_before = len(rig.tokens(job))
        n_repeated = rig.tick(n_late=1)
        batches = rig.engine.batches[-1 - n_repeated :]
        assert not any(batch.n_drafts for batch in batches[:-1])
        assert len(rig.tokens(job)) - n_before == len(batches) + batches[-1].n_drafted
    assert rig.tokens(job) == letters(40)
    assert rig.end(job).stats.drafted_tokens


@pytest.mark.parametrize("n_late", [1, MANY])
def test_the_draft_beside_the_last_token_before_a_stop_string_leaves_no_cells(n_late: int) -> None:
    for n_tokens in range(6, 30):
        stop = bytes(letters(n_tokens)[-2:]).decode()
        job = drafting_job(60, wrong_at=0, stop=[stop])
        rig = RepeatedTicksRig(job, caches=True, draft_tokens=8)
        while rig.scheduler.has_work:
            rig.tick(n_late=n_late)  # checks the cells of the cache
        assert rig.end(job).reason is FinishReason.STOP
        [held] = cached_tokens(rig)
        assert held == [*PROMPT, *rig.tokens(job)][: len(held)]


def test_only_one_draft_is_verified_before_the_time_of_drafts_is_known() -> None:
    rig = RepeatedTicksRig(drafting_job(60), draft_tokens=8)
    rig.prefill()
    rig.tick(0)
    rig.tick(20, n_late=MANY)
    assert [batch.n_drafts for batch in rig.engine.batches[2:]].count(1) == 1


def test_a_draft_that_cannot_be_removed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = RepeatedTicksRig(drafting_job(60, wrong_at=0), draft_tokens=8)
    rig.prefill()
    rig.tick(0)
    monkeypatch.setattr(rig.engine.sequences, "cut", lambda *_: 0)
    with pytest.raises(EngineError, match="could not remove the draft tokens"):
        rig.tick(n_late=1)


def test_drafts_of_repeated_ticks_use_only_the_room_that_the_batch_and_the_cells_have() -> None:
    jobs = [drafting_job(90), drafting_job(90)]
    rig = RepeatedTicksRig(
        *jobs, n_ctx=150, draft_tokens=100
    )  # the fake engine raises an error if there are too few cells
    while rig.scheduler.has_work:
        rig.tick(n_late=1)
    assert [rig.tokens(job) for job in jobs] == [letters(90)] * 2


def test_the_ticks_of_a_worker_that_drafts_are_repeated_if_no_job_drafts() -> None:
    rig = RepeatedTicksRig(make_job(max_tokens=40), draft_tokens=8)
    rig.prefill()
    assert rig.tick() == 38


class PreparingSampler(GreedySampler):
    """Records what is prepared."""

    can_prepare = True

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[tuple[list[int], tuple[int, ...]]] = []

    def prepare(self, history: Sequence[int], n_prompt: int, n_history: int, draft: Sequence[int]) -> None:
        self.prepared.append((list(history[n_prompt:n_history]), tuple(draft)))


def test_draws_are_prepared_along_the_draft_for_the_history_of_the_batch() -> None:
    sampler = PreparingSampler()
    rig = RepeatedTicksRig(make_job(max_tokens=20, sampler=sampler), make_job(max_tokens=20))
    repeater = rig.scheduler.repeater
    assert repeater is not None
    rig.prefill()
    rig.tick(0)
    constrained, plain = (slot for slot in rig.memory.active_slots)
    if constrained.active.job.sampler is not sampler:
        constrained, plain = plain, constrained
    prepare = repeater.preparation(Batch((DecodeToken(plain), DecodeToken(constrained, Draft((5, 6))))))
    assert prepare is not None
    generated = constrained.active.tokens[constrained.active.n_prompt :]
    rig.tick(0)  # the other thread is late, and the history has got another token
    prepare()
    assert sampler.prepared == [(generated, (5, 6))]
    assert repeater.preparation(Batch((DecodeToken(plain),))) is None
