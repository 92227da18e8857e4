"""A scheduler whose jobs share a prefix cache, on the fake engine."""

from __future__ import annotations

from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, Output
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.prefix_cache_interface import PrefixCache
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.testing import FakeEngine, ManualClock, make_job, make_memory, make_scheduler, run_to_end


def scheduler_with(
    cache: PrefixCache | None = None,
    n_ctx: int = 400,
    clock: ManualClock | None = None,
    *,
    n_slots: int = 2,
    n_seq_max: int = 7,
    host_bytes: int = 0,
    held_cells: int | None = None,
) -> tuple[Scheduler, FakeEngine]:
    engine = FakeEngine(n_ctx=n_ctx, n_batch=64, n_seq_max=n_seq_max)
    memory = make_memory(
        engine,
        n_slots=n_slots,
        cache=RadixPrefixCache() if cache is None else cache,
        offload=BlockTransfers(BlockStore(16, host_bytes, can_cut=True), engine.sequences) if host_bytes else None,
        held_cells=held_cells,
        similarity=0.1,
    )
    return make_scheduler(engine, memory, clock=clock or ManualClock()), engine


def run_all(scheduler: Scheduler, engine: FakeEngine, *jobs: Job) -> dict[str, JobEnded]:
    for job in jobs:
        scheduler.submit(job)
    return {end.job.id: end for end in ended(run_to_end(scheduler, engine))}


def run_an_unrelated_job(scheduler: Scheduler, engine: FakeEngine) -> None:
    """Run a job that shares no prefix. Meanwhile entries are evicted until they hold at most `held_cells` cells."""
    run_all(scheduler, engine, make_job([255] * 3, max_tokens=20, cache_prompt=False))


def ended(outputs: list[Output]) -> list[JobEnded]:
    return [output for output in outputs if isinstance(output, JobEnded)]


def leave(scheduler: Scheduler, job: Job, how: str) -> None:
    assert scheduler.cancel(job.id) if how == "cancel" else scheduler.release(job.lease)
