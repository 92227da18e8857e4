"""A model with a sliding window computes the same logits whatever the batches of a worker contain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.recording_sampler import RecordingSampler

from llamaq.tools.random_gguf import MEMORY_KINDS, write_model
from llamaq.worker.core.job import Job
from llamaq.worker.engine.engine import Engine
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.process.generation_parts import load_engine
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.settings import WorkerSettings
from llamaq.worker.testing import make_job

pytestmark = pytest.mark.starts_processes

WINDOW = 64
CHUNK = 64
N_SLOTS = 4


def settings(**values: Any) -> WorkerSettings:
    sizes: dict[str, Any] = {"n_ctx": 8192, "n_batch": 2048, "n_ubatch": WINDOW, "n_parallel": N_SLOTS, "n_threads": 1}
    return WorkerSettings(**(sizes | values))


@pytest.fixture(scope="module")
def sliding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "sliding.gguf"
    return write_model(path, replace(MEMORY_KINDS["sliding"], n_swa=WINDOW), seed=3)


@pytest.fixture(params=[{}, {"swa_full": False}, {"cache_prompt": False}], ids=["full", "window", "no cache"])
def engine(sliding_model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = load_engine(sliding_model, settings(**request.param))
    yield engine
    engine.close()


def expected_logits(model: Path, history: Sequence[int]) -> NDArray[np.float32]:
    engine = load_engine(model, settings(n_ubatch=2048, n_parallel=1))
    context = engine.context
    context.clear()
    context.batch.clear()
    context.batch.add_chunk(list(history), 0, 0, has_row=True)
    assert context.decode() == 0
    logits: NDArray[np.float32] = context.logits(1)[0].copy()
    engine.close()
    return logits


def run(engine: Engine, n_chunk: int) -> list[RecordingSampler]:
    """Prefill three prompts beside a stream in small parts, then, after the end of the stream, in large parts.

    The cells of the stream are free then, and llama.cpp takes them first.
    """
    pool = SlotPool(N_SLOTS, engine.context.n_ctx, engine.sequences.n_sequences, shares_cells=engine.context.kv_unified)
    memory = KvMemory(pool, engine.sequences, RadixPrefixCache(can_cut=engine.sequences.can_cut))
    strategy = GuardedStrategy(DecodeMaximal(), TickLimits(engine.context.n_batch, n_chunk))
    scheduler = Scheduler(memory, strategy, end_tokens=frozenset())
    rng = np.random.default_rng(5)

    def submit(n_tokens: int, **options: Any) -> Job:
        job = make_job(rng.integers(0, 500, n_tokens).tolist(), **options)
        job.context_limit = 2000
        job.sampler = RecordingSampler()
        scheduler.submit(job)
        return job

    def tick() -> None:
        scheduler.admit()
        scheduler.move(0.001)
        batch = scheduler.plan()
        scheduler.apply(batch, engine.run(batch) if batch else [])

    submit(n_chunk, max_tokens=4, cache_prompt=False)
    tick()
    jobs = [submit(5 * n_chunk // 2, max_tokens=3) for _ in range(3)]
    while scheduler.has_work:
        tick()
    return [job.sampler for job in jobs if isinstance(job.sampler, RecordingSampler)]


def test_prompts_in_small_and_large_parts_have_the_logits_of_whole_prompts(engine: Engine, sliding_model: Path) -> None:
    recorders = run(engine, CHUNK)
    assert len(recorders) == 3
    for recorder in recorders:
        for history, logits in recorder.draws:
            expected = expected_logits(sliding_model, history)
            assert np.abs(logits - expected).max() < 0.03 * expected.std()


def test_cells_of_other_sequences_are_not_taken_without_swa_full(sliding_model: Path) -> None:
    engine = load_engine(sliding_model, settings(swa_full=False))
    assert not engine.context.kv_unified
    engine.close()
