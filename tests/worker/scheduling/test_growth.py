"""Jobs take KV cells as they grow. When cells run out, entries are evicted, and then the youngest job waits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from tests.support.outputs import first_tokens
from tests.support.scheduler_rig import SchedulerRig

from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import SlotAcquired
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.prefix_cache_interface import NullPrefixCache
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.testing import FakeEngine, make_job, make_memory, make_scheduler


def next_token(history: Sequence[int]) -> int:
    """Return a letter. Faster than `next_letter` for long histories."""
    return ord("a") + (history[0] + 7 * history[-1] + 3 * len(history)) % 26


class Rig(SchedulerRig):
    """A scheduler with a prefix cache and host memory, or without both."""

    def __init__(self, n_ctx: int, n_slots: int = 4, *, margin: int = 64, caches: bool = True) -> None:
        engine = FakeEngine(n_ctx=n_ctx, n_batch=512, n_seq_max=n_slots + 6, next_token=next_token)
        self.memory = make_memory(
            engine,
            n_slots=n_slots,
            cache=RadixPrefixCache() if caches else NullPrefixCache(),
            offload=BlockTransfers(BlockStore(16, 10**7, can_cut=True), engine.sequences) if caches else None,
            margin=margin,
        )
        super().__init__(engine, make_scheduler(engine, self.memory, chunk_size=512), max_ticks=100_000)

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.scheduler.submit(job)


def test_a_small_job_runs_at_once_beside_two_jobs_that_may_become_large() -> None:
    rig = Rig(n_ctx=2048)
    rig.submit(*(make_job([at] * 20, job_id=f"long{at}", max_tokens=1900) for at in (1, 2)))
    rig.tick(3)
    rig.submit(make_job([3] * 5, job_id="hello", max_tokens=5))
    rig.tick()
    assert rig.running == ["hello", "long1", "long2"]
    rig.tick(10)
    assert rig.running == ["long1", "long2"]
    assert len(rig.tokens("hello")) == 5


def test_two_jobs_that_do_not_fit_together_end_one_after_the_other_with_all_their_tokens() -> None:
    rig = Rig(n_ctx=400)
    rig.submit(*(make_job([at] * 20, job_id=f"long{at}", max_tokens=350) for at in (1, 2)))
    assert list(rig.finish()) == ["long1", "long2"]
    assert rig.preemptions == 1
    for at in (1, 2):
        assert rig.tokens(f"long{at}") == first_tokens([at] * 20, 350, next_token)


def test_without_max_tokens_a_job_ends_at_its_context_limit() -> None:
    rig = Rig(n_ctx=200)
    rig.submit(make_job([1] * 20, job_id="j"))
    rig.submit(make_job([2] * 20, job_id="k", context_limit=50))
    ends = rig.finish()
    assert {job_id: (end.reason, end.stats.generated_tokens) for job_id, end in ends.items()} == {
        "k": (FinishReason.LENGTH, 30),
        "j": (FinishReason.LENGTH, 180),
    }


def test_entries_are_evicted_before_a_job_is_preempted() -> None:
    rig = Rig(n_ctx=300)
    rig.submit(make_job([1] * 150, max_tokens=2))
    rig.finish()
    rig.submit(make_job([2] * 20, job_id="j", max_tokens=120), make_job([3] * 20, job_id="k", max_tokens=120))
    rig.finish()
    assert rig.preemptions == 0
    assert rig.scheduler.cache_snapshot().evictions >= 1
    assert rig.tokens("j") == first_tokens([2] * 20, 120, next_token)


def test_the_youngest_bulk_job_is_preempted_for_cells_before_the_youngest_interactive_job() -> None:
    rig = Rig(n_ctx=300, caches=False)
    rig.submit(make_job([1] * 50, job_id="bulk", max_tokens=200, priority="bulk"))
    rig.tick()
    rig.submit(*(make_job([at] * 40, job_id=f"interactive{at}", max_tokens=120) for at in (2, 3)))
    while rig.preemptions < 1:
        rig.tick()
    assert rig.running == ["interactive2", "interactive3"]
    while rig.preemptions < 2:
        rig.tick()
    assert rig.running == ["interactive2"]
    ends = rig.finish()
    assert list(ends) == ["interactive2", "interactive3", "bulk"]
    assert rig.tokens("bulk") == first_tokens([1] * 50, 200, next_token)


def test_a_job_that_lost_its_slot_comes_back_only_with_room_for_a_larger_margin() -> None:
    rig = Rig(n_ctx=300, n_slots=3, margin=8)
    rig.submit(*(make_job([at] * 10, job_id=f"j{at}", max_tokens=280) for at in range(3)))
    ends = rig.finish()
    n_admissions = Counter(output.job.id for output in rig.outputs if isinstance(output, SlotAcquired))
    assert next(iter(ends)) == "j0"
    # The margin doubles with each admission, so that the sixth one needs the whole context.
    assert n_admissions["j0"] == 1
    assert max(n_admissions.values()) <= 7
    for at in range(3):
        assert rig.tokens(f"j{at}") == first_tokens([at] * 10, 280, next_token)


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_no_job_is_preempted_for_ever_and_all_generate_the_same_tokens_as_alone(seed: int, caches: bool) -> None:
    chance = random.Random(seed)
    rig = Rig(n_ctx=128, n_slots=5, margin=chance.choice([1, 4, 32]), caches=caches)
    jobs = [
        make_job(
            [chance.randrange(256) for _ in range(chance.randrange(1, 100))],
            job_id=f"j{at}",
            max_tokens=chance.choice([None, 5, 40]),
            priority=chance.choice(["bulk", "interactive"]),
        )
        for at in range(20)
    ]
    work = 128 * len(jobs)
    for job in jobs:
        rig.submit(job)
        rig.tick(chance.randrange(12))
    n_ticks = 0
    while rig.scheduler.has_work:
        rig.tick()
        n_ticks += 1
        assert n_ticks < 3 * work
    ends = rig.finish()
    assert ends.keys() == {job.id for job in jobs}
    n_admissions = Counter(output.job.id for output in rig.outputs if isinstance(output, SlotAcquired))
    assert max(n_admissions.values()) < 20
    for job in jobs:
        tokens = rig.tokens(job.id)
        assert ends[job.id].reason is FinishReason.LENGTH
        assert len(job.prompt) + len(tokens) == job.max_length
        assert tokens == first_tokens(job.prompt, len(tokens), next_token)
