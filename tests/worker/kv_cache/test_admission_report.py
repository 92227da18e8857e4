"""Logs, slots and stats say how many tokens of a prompt were found, where, and what was evicted for the job."""

from __future__ import annotations

import logging

import pytest

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.worker.core.outputs import JobEnded
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.testing import FakeEngine, make_job, make_memory, make_scheduler, run_tick, run_to_end


class Rig:
    """A scheduler with a prefix cache, and with host memory if `host` is set."""

    def __init__(self, caplog: pytest.LogCaptureFixture, *, host: bool = False, held_cells: int | None = None) -> None:
        caplog.set_level(logging.INFO, "llamaq.worker.scheduling")
        self._caplog = caplog
        self.engine = FakeEngine(n_ctx=100, n_batch=64, n_seq_max=8)
        offload = BlockTransfers(BlockStore(16, 10**6, can_cut=True), self.engine.sequences) if host else None
        memory = make_memory(
            self.engine, n_slots=2, cache=RadixPrefixCache(), offload=offload, held_cells=held_cells, margin=8
        )
        self.scheduler = make_scheduler(self.engine, memory)

    def run(self, job_id: str, prompt: list[int], max_tokens: int = 2) -> JobEnded:
        self.scheduler.submit(make_job(prompt, job_id=job_id, max_tokens=max_tokens))
        outputs = run_to_end(self.scheduler, self.engine)
        return next(output for output in outputs if isinstance(output, JobEnded))

    @property
    def admissions(self) -> list[str]:
        lines = [record.getMessage() for record in self._caplog.records]
        return [line.removeprefix("job.admitted ") for line in lines if line.startswith("job.admitted ")]


def test_a_prefix_on_the_device_is_reported_with_its_sequence(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(caplog)
    first = rig.run("first", [1] * 30)
    stats = rig.run("second", [1] * 25 + [2] * 5).stats
    seq_id = first.stats.seq_id
    nothing_evicted = "evicted_tokens=0 evicted_sequences=none"
    assert rig.admissions == [
        f"id=first slot=0 prompt_tokens=30 cached_tokens=0 from=none {nothing_evicted}",
        f"id=second slot=1 prompt_tokens=30 cached_tokens=25 from=device:{seq_id} {nothing_evicted}",
    ]
    assert (stats.prefix_cache_tokens, stats.prefix_cache_tier) == (25, CacheTier.DEVICE)
    assert (stats.prefix_cache_seq_id, stats.evicted_tokens) == (seq_id, 0)
    assert first.stats.prefix_cache_seq_id is None


def test_a_prefix_that_a_running_job_computes_is_reported_with_its_sequence(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(caplog)
    for job_id in ("leader", "follower"):
        rig.scheduler.submit(make_job([1] * 25 + [ord(job_id[0])] * 5, job_id=job_id, max_tokens=9))
    for _ in range(4):
        run_tick(rig.scheduler, rig.engine)
    leader, follower = rig.scheduler.snapshot()
    assert (follower.job_id, follower.prompt_tokens, follower.cached_tokens) == ("follower", 30, 25)
    assert (leader.prompt_tokens, leader.cached_tokens) == (30, 0)
    assert "cached_tokens=25 from=running:" in rig.admissions[1]


def test_evicted_sequences_are_reported_at_the_admission_that_they_made_room_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(caplog)
    evicted = [rig.run(f"old{at}", [at] * 40).stats.seq_id for at in range(2)]
    stats = rig.run("large", [7] * 90).stats
    assert stats.evicted_tokens == 2 * 41
    assert rig.admissions[-1].endswith(f"evicted_tokens=82 evicted_sequences={evicted[0]},{evicted[1]}")
    assert rig.run("small", [8] * 5).stats.evicted_tokens == 0


def test_a_prefix_in_host_memory_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(caplog, host=True, held_cells=0)
    rig.run("first", [1] * 48)
    rig.run("other", [2] * 60)
    stats = rig.run("second", [1] * 48 + [3] * 5).stats
    assert "cached_tokens=48 from=host evicted" in rig.admissions[-1]
    assert (stats.prefix_cache_tokens, stats.prefix_cache_tier, stats.prefix_cache_seq_id) == (
        48,
        CacheTier.HOST,
        None,
    )
