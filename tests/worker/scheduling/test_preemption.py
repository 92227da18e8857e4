"""An interactive job does not wait for bulk jobs. The bulk job admitted last is preempted, and resumes later."""

from __future__ import annotations

from random import Random

import pytest
from tests.support.scheduler_rig import SchedulerRig

from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, SlotAcquired
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.testing import (
    FakeEngine,
    GreedySampler,
    ManualClock,
    make_job,
    make_memory,
    make_scheduler,
)


class Rig(SchedulerRig):
    """A scheduler with a prefix cache and host memory."""

    def __init__(self, n_ctx: int = 1000, n_slots: int = 2, host_bytes: int = 10**6) -> None:
        engine = FakeEngine(n_ctx=n_ctx, n_batch=64, n_seq_max=n_slots + 6)
        self.clock = ManualClock()
        offload = BlockTransfers(BlockStore(16, host_bytes, can_cut=True), engine.sequences)
        memory = make_memory(engine, n_slots=n_slots, cache=RadixPrefixCache(), offload=offload if host_bytes else None)
        super().__init__(engine, make_scheduler(engine, memory, clock=self.clock))
        self.memory = memory

    def submit(self, job_id: str, prompt: list[int], *, bulk: bool = False, **params: object) -> None:
        priority = "bulk" if bulk else "interactive"
        self.scheduler.submit(make_job(prompt, job_id=job_id, priority=priority, **params))  # type: ignore[arg-type]

    def job(self, job_id: str) -> Job:
        """Return a job that has had a slot."""
        jobs = (output.job for output in self.outputs if output.job.id == job_id)
        return next(job for job in jobs if isinstance(job, Job))


def generate_alone(prompt: list[int], max_tokens: int) -> list[int]:
    rig = Rig()
    rig.submit("alone", prompt, max_tokens=max_tokens)
    rig.finish()
    return rig.tokens("alone")


def test_the_bulk_job_admitted_last_is_preempted_and_generates_the_same_tokens_as_alone() -> None:
    rig = Rig()
    rig.submit("old", [1] * 20, bulk=True, max_tokens=30)
    rig.submit("young", [2] * 20, bulk=True, max_tokens=30)
    rig.tick(9)
    rig.submit("urgent", [3] * 20, max_tokens=5)
    rig.tick()
    assert rig.running == ["old", "urgent"]
    ends = rig.finish()
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}
    assert list(ends) == ["urgent", "old", "young"]
    assert rig.tokens("young") == generate_alone([2] * 20, 30)
    assert ends["young"].stats.generated_tokens == 30
    assert rig.preemptions == 1
    # The cells of the preempted job are cached, so only the last token of its history is computed again.
    assert ends["young"].stats.prefix_cache_tokens == ends["young"].stats.prompt_tokens == 20
    assert 0.95 < ends["young"].stats.prefix_cache_ratio < 1
    assert rig.engine.computed == 3 * 20 + 29 + 4 + 29


def test_each_slot_that_a_job_gets_or_loses_is_reported_once_around_the_tokens_of_its_run() -> None:
    rig = Rig(n_slots=1)
    rig.submit("bulk", [1] * 20, bulk=True, max_tokens=6)
    rig.tick(4)
    rig.submit("urgent", [2] * 20, max_tokens=1)
    rig.finish()
    kinds = [type(output).__name__ for output in rig.outputs if output.job.id == "bulk"]
    n_before = rig.outputs.index(next(out for out in rig.outputs if out.job.id == "urgent")) - 2
    n_after = 6 - n_before
    assert n_before > 0
    runs = ["SlotAcquired", *["NewToken"] * n_before, "SlotLost", "SlotAcquired", *["NewToken"] * n_after, "JobEnded"]
    assert kinds == runs
    assert isinstance(rig.outputs[0], SlotAcquired)


def test_a_job_is_preempted_for_cells_only_after_entries_are_evicted() -> None:
    rig = Rig(n_ctx=200)
    rig.submit("bulk", [1] * 60, bulk=True, max_tokens=60)
    rig.tick(6)
    rig.submit("small", [2] * 30, max_tokens=10)
    rig.tick(20)
    rig.submit("fits", [3] * 30, max_tokens=30)  # enough cells are free after the eviction of the small job's entry
    rig.tick(5)
    assert (rig.running, rig.preemptions) == (["bulk", "fits"], 0)
    rig.finish()
    rig.submit("bulk2", [4] * 60, bulk=True, max_tokens=60)
    rig.tick(16)
    rig.submit("large", [5] * 100, max_tokens=60)
    ends = rig.finish()
    assert rig.preemptions == 1
    assert rig.tokens("bulk2") == generate_alone([4] * 60, 60)
    assert all(end.reason is FinishReason.LENGTH for end in ends.values())


def test_no_job_is_preempted_if_the_room_is_still_too_small_or_for_a_job_of_equal_priority() -> None:
    rig = Rig(n_ctx=200)
    rig.submit("interactive", [1] * 90, max_tokens=60)
    rig.submit("bulk", [2] * 20, bulk=True, max_tokens=40)
    rig.tick(9)
    rig.submit("too large beside the first", [3] * 100, max_tokens=20)
    rig.submit("equal", [4] * 20, bulk=True, max_tokens=5)
    rig.tick(6)
    assert (rig.running, rig.preemptions) == (["bulk", "interactive"], 0)


def test_the_time_that_a_preempted_job_waits_does_not_count_for_its_timeout() -> None:
    rig = Rig(n_slots=1)
    rig.submit("bulk", [1] * 20, bulk=True, max_tokens=30, timeout_s=5)
    rig.tick(3)
    rig.clock.now_s += 4
    rig.tick()
    rig.submit("urgent", [2] * 20, max_tokens=5)
    rig.tick(2)
    assert rig.running == ["urgent"]
    rig.clock.now_s += 100
    while rig.running != ["bulk"]:
        rig.tick()
    rig.clock.now_s += 0.9
    rig.tick()
    assert rig.running == ["bulk"]
    rig.clock.now_s += 0.2
    rig.tick()
    ends = {output.job.id: output.reason for output in rig.outputs if isinstance(output, JobEnded)}
    assert ends == {"urgent": FinishReason.LENGTH, "bulk": FinishReason.DEADLINE}


def test_a_preempted_job_reaches_its_deadline_in_the_waiting_queue() -> None:
    rig = Rig(n_slots=1)
    rig.submit("bulk", [1] * 20, bulk=True, max_tokens=30)
    rig.tick(6)
    rig.job("bulk").times.deadline_s = rig.clock.now_s + 5
    rig.submit("urgent", [2] * 20, max_tokens=30)
    rig.tick(2)
    assert rig.running == ["urgent"]
    rig.clock.now_s += 5
    rig.tick()
    end = next(out for out in rig.outputs if isinstance(out, JobEnded))
    assert (end.job.id, end.reason, end.stats.generated_tokens) == (
        "bulk",
        FinishReason.DEADLINE,
        len(rig.tokens("bulk")),
    )
    assert isinstance(end.job, Job)
    assert isinstance(end.job.sampler, GreedySampler)
    assert end.job.sampler.closed == 1


def test_times_count_from_the_first_slot_of_the_attempt_and_not_of_its_last_run() -> None:
    rig = Rig(n_slots=1)
    rig.submit("bulk", [1] * 20, bulk=True, max_tokens=10)
    rig.clock.now_s += 1
    rig.tick(4)
    rig.submit("urgent", [2] * 20, max_tokens=1)
    rig.tick()
    rig.clock.now_s += 10
    ends = rig.finish()
    stats = ends["bulk"].stats
    assert (stats.queue_ms, stats.ttft_ms, stats.duration_ms) == (1000, 0, 10_000)
    assert stats.preempted_ms == 10_000
    assert ends["urgent"].stats.preempted_ms is None


def test_a_preempted_job_that_ends_without_a_slot_has_the_stats_of_its_last_run() -> None:
    rig = Rig(n_slots=1)
    rig.submit("bulk", [1] * 20, bulk=True, max_tokens=10)
    for _ in range(4):
        rig.clock.now_s += 0.5
        rig.tick()
    rig.submit("urgent", [2] * 20, max_tokens=30)
    rig.clock.now_s += 0.5
    rig.tick(4)
    rig.scheduler.cancel("bulk")
    stats = rig.finish()["bulk"].stats
    assert (stats.slot, stats.generated_tokens, stats.ttft_ms, stats.generation_rate) == (0, 3, 500, 1.33)
    assert (stats.prompt_eval_rate, stats.prefix_cache_ratio) == (40, 0)
    assert stats.seq_id is not None


def test_a_preempted_job_keeps_the_time_of_its_first_token_while_its_next_run_has_none() -> None:
    rig = Rig(n_slots=1, host_bytes=0)
    rig.submit("bulk", [1] * 150, bulk=True, max_tokens=10)
    rig.tick(12)
    n_generated = len(rig.tokens("bulk"))
    rig.submit("urgent", [2] * 900, max_tokens=1)
    rig.tick()
    while rig.running == ["urgent"]:
        rig.tick()
    rig.clock.now_s += 3
    rig.scheduler.cancel("bulk")
    stats = rig.finish()["bulk"].stats
    assert n_generated > 0
    assert (stats.generated_tokens, stats.ttft_ms, stats.generation_rate) == (n_generated, 0, None)


def test_jobs_that_are_preempted_repeatedly_generate_the_same_tokens_as_alone() -> None:
    rig = Rig(n_ctx=260, n_slots=3, host_bytes=20_000)
    for at in range(6):
        rig.submit(f"bulk{at}", [at] * 40, bulk=True, max_tokens=40)
    for at in range(30):
        rig.tick(4)
        rig.submit(f"urgent{at}", [100 + at] * 30, max_tokens=4)
    ends = rig.finish()
    assert len(ends) == 36
    assert rig.preemptions > 3
    for at in range(6):
        assert rig.tokens(f"bulk{at}") == generate_alone([at] * 40, 40)


def test_an_interactive_job_does_not_wait_for_a_bulk_job_behind_one_that_waits_for_another_interactive_job() -> None:
    large = list(range(1, 101)) * 30
    for first in (
        make_job([4] * 20, job_id="first", slot=0, max_tokens=3),
        make_job(large, job_id="first", max_tokens=3),
    ):
        rig = Rig(n_ctx=3200, host_bytes=0)
        rig.submit("running", [1] * 300, slot=0, max_tokens=300)
        rig.tick()
        rig.submit("bulk", [2] * 20, bulk=True, max_tokens=2000)
        rig.tick(8)
        assert rig.running == ["bulk", "running"]
        rig.scheduler.submit(first)
        rig.submit("urgent", [3] * 20, max_tokens=5)
        rig.tick()
        assert rig.running == ["running", "urgent"]
        assert next(iter(rig.finish())) == "urgent"


def test_an_interactive_job_preempts_a_bulk_job_beside_jobs_that_share_most_of_their_cells() -> None:
    rig = Rig(n_ctx=240, n_slots=4, host_bytes=0)
    system = [9] * 100
    for at in range(3):
        rig.submit(f"user{at}", [*system, *[at] * 10], max_tokens=20)
    rig.submit("bulk", [*system, *[7] * 10], bulk=True, max_tokens=20)
    rig.tick(14)
    assert rig.running == ["bulk", "user0", "user1", "user2"]
    rig.submit("urgent", [*system, *[8] * 10], max_tokens=20)
    rig.tick()
    assert rig.running == ["urgent", "user0", "user1", "user2"]
    ends = rig.finish()
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}
    assert rig.tokens("bulk") == generate_alone([*system, *[7] * 10], 20)


def test_no_job_is_preempted_for_one_that_would_lose_its_prefix_with_the_entry_of_the_preempted_job() -> None:
    rig = Rig(n_ctx=220, host_bytes=0)
    prefix = [9] * 100
    rig.submit("user", [1] * 60, max_tokens=40)
    rig.submit("bulk", [*prefix, *[7] * 10], bulk=True, max_tokens=40)
    rig.tick(12)
    assert rig.running == ["bulk", "user"]
    rig.submit("large", [*prefix, *[8] * 40], max_tokens=5)
    rig.tick(4)
    assert (rig.running, rig.preemptions) == (["bulk", "user"], 0)
    assert {end.reason for end in rig.finish().values()} == {FinishReason.LENGTH}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_after_each_preemption_an_interactive_job_gets_a_slot(seed: int) -> None:
    random_numbers = Random(seed)
    rig = Rig(n_ctx=random_numbers.choice([230, 260, 300]), n_slots=3, host_bytes=0)
    n_preemptions = 0
    for number in range(200):
        prompt = [9] * random_numbers.choice([0, 40, 100, 150]) + random_numbers.choices(range(3), k=20)
        is_bulk = rig.scheduler.n_waiting < 2
        n_generated = random_numbers.randint(1, 20)
        rig.submit(f"{number}", prompt, bulk=is_bulk, max_tokens=60 if is_bulk else n_generated)
        for _ in range(random_numbers.randint(0, 16)):
            before, n_before = set(rig.running), rig.preemptions
            rig.scheduler.admit()
            if rig.preemptions > n_before:
                n_preemptions += 1
                new = [slot for slot in rig.memory.active_slots if slot.active.job.id not in before]
                assert any(slot.priority is Priority.INTERACTIVE for slot in new)
            rig.tick()
    assert n_preemptions > 5
    assert len(rig.finish()) == 200
