"""Jobs with `prompt_logprobs` get one entry for each token of their prompt, whatever happens to their cells."""

from __future__ import annotations

from math import e, log
from typing import Any

import pytest
from tests.support.outputs import tokens_of
from tests.support.scheduler_rig import SchedulerRig

from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.worker.core.batch import Batch, PrefillChunk
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import NewToken, PromptScored
from llamaq.worker.core.slot import Run, Slot, SlotState
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.scheduling.strategies.scored_tokens_limit import with_bounded_scores
from llamaq.worker.testing import FakeEngine, make_job, make_memory, make_scheduler

PROMPT = list(b"the quick brown fox jumps over the lazy dog and runs away")
N_SCORED = 64
"""Upper bound of the harness on the tokens of a tick whose logits are computed."""


def make_rig(*, n_slots: int = 2, **engine_options: Any) -> SchedulerRig:
    engine = FakeEngine(**engine_options)
    memory = make_memory(engine, n_slots=n_slots, cache=RadixPrefixCache(can_cut=engine.sequences.can_cut))
    return SchedulerRig(engine, make_scheduler(engine, memory))


def scored_job(prompt: list[int] = PROMPT, n_top: int = 1, **options: Any) -> Job:
    return make_job(prompt, prompt_logprobs=n_top, **{"max_tokens": 3, **options})


def scores_of(rig: SchedulerRig, job: Job) -> PromptLogprobs:
    """Return the probabilities of the job's prompt, which were reported once and before the first token."""
    outputs = [one for one in rig.outputs if isinstance(one, PromptScored | NewToken) and one.job is job]
    scored = [one for one in outputs if isinstance(one, PromptScored)]
    assert len(scored) == 1
    assert outputs[0] is scored[0]
    return scored[0].prompt_logprobs


def check(found: PromptLogprobs, prompt: list[int], rig: SchedulerRig) -> None:
    """Assert that the entries are those of the fake model."""
    assert found.tokens == tuple(prompt)
    assert len(found) == len(prompt)
    assert found[0] is None
    log_total = log(rig.engine.n_vocab - 1 + e)
    for at, entry in enumerate(found[1:], 1):
        best = rig.engine._next_token(tuple(prompt[:at]))
        assert entry is not None
        assert (entry.token, entry.rank) == (prompt[at], 1 if prompt[at] == best else 2)
        assert entry.logprob == pytest.approx((prompt[at] == best) - log_total, abs=1e-4)
        ((other, value),) = entry.top
        assert other == best
        assert value == pytest.approx(1 - log_total, abs=1e-4)


def test_each_token_of_the_prompt_has_an_entry_before_the_first_token_is_generated() -> None:
    for prompt in (PROMPT, PROMPT[:1], PROMPT[:2], PROMPT[:16], PROMPT[:17], PROMPT[:18]):
        rig = make_rig()
        job = scored_job(prompt)
        rig.scheduler.submit(job)
        rig.finish()
        check(scores_of(rig, job), prompt, rig)
        assert len(tokens_of(rig.outputs, job.id)) == 3


def test_a_scored_prompt_reuses_no_cells_and_leaves_its_own_to_others() -> None:
    rig = make_rig()
    plain = make_job(PROMPT, max_tokens=3)
    rig.scheduler.submit(plain)
    rig.finish()
    first, second = scored_job(), scored_job()  # at once: the second one does not follow the first one
    rig.scheduler.submit(first)
    rig.scheduler.submit(second)
    ends = rig.finish()
    for job in (first, second):
        check(scores_of(rig, job), PROMPT, rig)
        assert ends[job.id].stats.prefix_cache_tokens == 0
    assert rig.engine.computed == 3 * (len(PROMPT) + 2)
    other = [*PROMPT, 1, 2]
    for prompt in ([*other, 3], [*other, 4]):
        rig.scheduler.submit(scored_job(prompt) if prompt[-1] == 3 else make_job(prompt, max_tokens=1))
        ends = rig.finish()
    assert [end.stats.prefix_cache_tokens for end in ends.values()][-2:] == [0, len(other)]


def test_no_job_waits_for_a_prompt_that_is_scored_but_later_jobs_copy_its_cells() -> None:
    rig = make_rig(n_slots=3)
    scored, together, later = scored_job(), make_job(PROMPT, max_tokens=1), make_job(PROMPT, max_tokens=1)
    rig.scheduler.submit(scored)
    rig.tick(2)
    n_computed = rig.engine.computed
    rig.scheduler.submit(together)
    rig.tick()
    assert [slot.state for slot in rig.scheduler.snapshot()] == ["prefill", "prefill", "idle"]
    ends = rig.finish()
    assert ends[together.id].stats.prefix_cache_tokens == n_computed > 0
    check(scores_of(rig, scored), PROMPT, rig)
    rig.scheduler.submit(later)
    assert rig.finish()[later.id].stats.prefix_cache_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("can_cut", [True, False])
def test_tokens_whose_cells_were_lost_are_scored_again(can_cut: bool) -> None:
    for n_ticks, n_left in ((1, 5), (2, 0), (3, 31), (4, 3)):
        rig = make_rig(can_cut=can_cut)
        job = scored_job()
        rig.scheduler.submit(job)
        rig.tick(n_ticks)
        rig.engine.lose_cells(job.id, n_left)
        rig.finish()
        check(scores_of(rig, job), PROMPT, rig)


def test_a_job_that_is_preempted_in_its_prompt_is_scored_from_the_beginning() -> None:
    rig = make_rig(n_slots=1)
    job = scored_job(priority=Priority.BULK)
    rig.scheduler.submit(job)
    rig.tick(2)
    rig.scheduler.submit(make_job(b"now", max_tokens=1))
    ends = rig.finish()
    assert rig.preemptions == 1
    check(scores_of(rig, job), PROMPT, rig)
    assert ends[job.id].stats.prefix_cache_tokens == 0


def test_a_job_that_is_preempted_after_its_first_token_is_not_scored_again() -> None:
    rig = make_rig(n_slots=1)
    job = scored_job(priority=Priority.BULK, max_tokens=20)
    rig.scheduler.submit(job)
    rig.tick(6)
    rig.scheduler.submit(make_job(b"now", max_tokens=1))
    ends = rig.finish()
    assert rig.preemptions == 1
    check(scores_of(rig, job), PROMPT, rig)
    assert len(tokens_of(rig.outputs, job.id)) == 20
    assert ends[job.id].stats.prefix_cache_tokens == len(PROMPT)


def test_a_resumed_job_whose_scores_are_published_is_not_scored_again() -> None:
    rig = make_rig()
    job = make_job(PROMPT, resumed=[1, 2], prompt_logprobs=1, max_tokens=5)
    rig.scheduler.submit(job)
    rig.finish()
    assert not [one for one in rig.outputs if isinstance(one, PromptScored)]
    assert len(tokens_of(rig.outputs, job.id)) == 3


def test_the_scored_tokens_of_a_tick_are_bounded_and_shared_equally() -> None:
    rig = make_rig(n_slots=8)
    jobs = [scored_job([number, *PROMPT]) for number in range(6)]
    plain = make_job(PROMPT, max_tokens=1)
    for job in (*jobs, plain):
        rig.scheduler.submit(job)
    rig.tick()
    chunks = {chunk.slot.active.job: chunk.n_tokens for chunk in rig.engine.batches[0].prefill}
    assert chunks.pop(plain) == 16
    assert sorted(chunks.values()) == [10, 10, 11, 11, 11, 11]
    rig.finish()
    for job in jobs:
        check(scores_of(rig, job), job.prompt, rig)
    assert max(batch.n_prefill for batch in rig.engine.batches) == N_SCORED + 16


def test_more_scored_jobs_than_the_bound_has_tokens_wait_for_each_other() -> None:
    rig = make_rig(n_slots=80, n_seq_max=120)
    jobs = [scored_job([number, *PROMPT[:3]], max_tokens=1) for number in range(80)]
    for job in jobs:
        rig.scheduler.submit(job)
    rig.tick()
    assert rig.engine.batches[0].n_prefill == N_SCORED
    rig.finish()
    for job in jobs:
        check(scores_of(rig, job), job.prompt, rig)


def test_if_there_are_more_scored_jobs_than_tokens_those_that_were_admitted_first_are_computed() -> None:
    slots = []
    for index, admitted_s in enumerate([3.0, 1.0, 2.0]):
        job = scored_job()
        slots.append(Slot(index, SlotState.PREFILL, Run(job, index, job.prompt, admitted_s=admitted_s)))
    batch = with_bounded_scores(Batch((), tuple(PrefillChunk(slot, 4) for slot in slots)), 2)
    assert [chunk.slot.index for chunk in batch.prefill] == [1, 2]


def test_a_job_that_generates_no_token_has_only_its_scores() -> None:
    rig = make_rig()
    scored, plain = scored_job(max_tokens=0), make_job(PROMPT[:20], max_tokens=0)
    rig.scheduler.submit(scored)
    rig.scheduler.submit(plain)
    ends = rig.finish()
    check(scores_of(rig, scored), PROMPT, rig)
    for job in (scored, plain):
        end = ends[job.id]
        assert (end.reason, end.stats.generated_tokens, tokens_of(rig.outputs, job.id)) == (FinishReason.LENGTH, 0, [])
    rig.scheduler.submit(make_job(PROMPT[:20], max_tokens=1))
    assert [*rig.finish().values()][-1].stats.prefix_cache_tokens == 19


def test_an_error_in_the_prompt_ends_the_job_without_scores() -> None:
    rig = make_rig()
    job = scored_job()
    rig.engine.fail_job(job.id)
    rig.scheduler.submit(job)
    assert rig.finish()[job.id].error is not None
    assert not [one for one in rig.outputs if isinstance(one, PromptScored)]
