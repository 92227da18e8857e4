"""The prefix cache on llama.cpp, for every kind of memory: reused cells give the same logits as computed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.support.recording_sampler import RecordingSampler

from llamaq.common.protocol.job_outcome import CacheTier, JobStats
from llamaq.tools.random_gguf import MEMORY_KINDS, write_model
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.prefix_cache_interface import NullPrefixCache
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.offload.block_transfers import BLOCK_TOKENS, BlockTransfers
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.testing import make_job

NOISE = 0.02
"""Upper bound on how much the shape of a batch changes logits, as a share of their standard deviation."""
KINDS = [(model, unified) for model in sorted(MEMORY_KINDS) for unified in (True, False)]


@dataclass
class Rig:
    """A scheduler on a real engine, without a worker around it."""

    engine: Engine
    scheduler: Scheduler
    samplers: dict[str, RecordingSampler] = field(default_factory=dict)

    ended: dict[str, JobStats] = field(default_factory=dict)

    def run(self, *jobs: Job) -> dict[str, JobStats]:
        """Run until all jobs and all transfers that they cause have ended. Return the stats of the ended jobs."""
        for job in jobs:
            self.submit(job)
        for _ in range(2000):
            if not self.scheduler.has_work:
                ended, self.ended = self.ended, {}
                return ended
            self.tick()
        raise AssertionError(f"{self.scheduler!r} still has work")

    def submit(self, job: Job) -> None:
        job.sampler = self.samplers[job.id] = RecordingSampler()
        self.scheduler.submit(job)

    def tick(self) -> None:
        self.scheduler.admit()
        self.scheduler.move(0.001)
        batch = self.scheduler.plan()
        results = self.engine.run(batch) if batch else []
        for output in self.scheduler.apply(batch, results).outputs:
            if isinstance(output, JobEnded):
                assert output.error is None
                self.ended[output.job.id] = output.stats
        self.scheduler.check_integrity()

    def history(self, job_id: str) -> list[int]:
        """Return the tokens of an ended job that had a cell in its sequence."""
        return list(self.samplers[job_id].draws[-1][0])


@pytest.fixture
def make_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Rig]]:
    engines: list[Engine] = []
    folder = tmp_path_factory.getbasetemp() / "cache-kinds"
    folder.mkdir(exist_ok=True)

    def build(
        model: str,
        unified: bool,
        *,
        cache: bool = True,
        host: bool = False,
        n_slots: int = 4,
        n_seq_max: int = 12,
        n_ctx: int = 3072,
    ) -> Rig:
        path = folder / f"{model}.gguf"
        if not path.exists():
            write_model(path, MEMORY_KINDS[model], seed=3)
        options = ContextOptions(
            n_ctx=n_ctx,
            n_batch=256,
            n_ubatch=64,
            n_seq_max=n_seq_max,
            n_threads=1,
            n_threads_batch=1,
            kv_unified=unified,
        )
        engine = Engine(Model(Path(path), ModelOptions(n_gpu_layers=0)), options)
        engines.append(engine)
        store = BlockStore(
            BLOCK_TOKENS if engine.sequences.can_save_parts else None, 10**8, can_cut=engine.sequences.can_cut_saved
        )
        pool = SlotPool(
            n_slots,
            engine.context.n_ctx,
            engine.sequences.n_sequences,
            shares_cells=engine.context.kv_unified,
            similarity=0.1,
        )
        memory = KvMemory(
            pool,
            engine.sequences,
            RadixPrefixCache(can_cut=engine.sequences.can_cut) if cache else NullPrefixCache(),
            BlockTransfers(store, engine.sequences) if host else None,
            held_cells=0 if host else None,
        )
        guarded = GuardedStrategy(DecodeMaximal(), TickLimits(budget=256, chunk_size=64))
        scheduler = Scheduler(memory, guarded, end_tokens=frozenset())
        return Rig(engine, scheduler)

    yield build
    for engine in engines:
        engine.close()


def prompt(n_tokens: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 500, n_tokens).tolist()
    return tokens


def assert_alike(rig: Rig, reference: Rig) -> None:
    """Assert that the logits of each draw equal those of a run without cache, after the same history."""
    n_compared = 0
    for job_id, sampler in rig.samplers.items():
        expected = dict(reference.samplers[job_id].draws)
        for history, logits in sampler.draws:
            if history in expected:
                n_compared += 1
                difference = np.abs(logits - expected[history]).max()
                assert difference < NOISE * expected[history].std(), f"{job_id} after {len(history)} tokens"
    assert n_compared >= 3 * len(rig.samplers)


@pytest.mark.parametrize(("model", "unified"), KINDS)
def test_a_second_turn_computes_its_new_tokens_and_at_most_one_more(
    make_rig: Callable[..., Rig], model: str, unified: bool
) -> None:
    rig, reference = make_rig(model, unified), make_rig(model, unified, cache=False)
    rig.run(make_job(prompt(150, 1), job_id="turn1", max_tokens=6))
    second = [*rig.history("turn1"), *prompt(30, 2)]
    stats = rig.run(make_job(second, job_id="turn2", max_tokens=6))["turn2"]
    assert stats.prefix_cache_tokens >= len(second) - 31
    assert stats.prefix_cache_tier is CacheTier.DEVICE
    for job_id, tokens in (("turn1", prompt(150, 1)), ("turn2", second)):
        reference.run(make_job(tokens, job_id=job_id, max_tokens=6))
    assert_alike(rig, reference)


@pytest.mark.parametrize(("model", "unified"), KINDS)
def test_jobs_submitted_together_compute_their_common_prefix_once(
    make_rig: Callable[..., Rig], model: str, unified: bool
) -> None:
    rig, reference = make_rig(model, unified), make_rig(model, unified, cache=False)

    def jobs() -> list[Job]:
        return [make_job(prompt(170, 1) + prompt(9, 10 + at), job_id=f"j{at}", max_tokens=5) for at in range(4)]

    stats = rig.run(*jobs())
    assert sorted(stat.prefix_cache_tokens for stat in stats.values()) == [0, 170, 170, 170]
    assert {stat.prefix_cache_tier for stat in stats.values()} <= {None, CacheTier.RUNNING, CacheTier.DEVICE}
    reference.run(*jobs())
    assert_alike(rig, reference)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("model", ["recurrent", "hybrid"])
def test_jobs_submitted_together_share_a_state_also_with_as_many_sequences_as_slots(
    make_rig: Callable[..., Rig], model: str, unified: bool
) -> None:
    rig, reference = make_rig(model, unified, n_seq_max=4), make_rig(model, unified, cache=False)

    def jobs() -> list[Job]:
        return [make_job(prompt(170, 1) + prompt(9, 10 + at), job_id=f"j{at}", max_tokens=5) for at in range(4)]

    stats = rig.run(*jobs())
    assert sorted(stat.prefix_cache_tokens for stat in stats.values()) == [0, 170, 170, 170]
    reference.run(*jobs())
    assert_alike(rig, reference)


@pytest.mark.parametrize(("model", "unified"), KINDS)
def test_users_share_a_system_prompt_however_many_other_tokens_were_computed_meanwhile(
    make_rig: Callable[..., Rig], model: str, unified: bool
) -> None:
    rig = make_rig(model, unified, n_ctx=1024 if unified else 8192, n_seq_max=16)
    reused = []
    for user in range(4):
        # The cells of this job are free again when the next job takes cells, which are then not in the order of time.
        rig.run(make_job(prompt(100 + user, 20 + user), max_tokens=2, cache_prompt=False, context_limit=1000))
        job = make_job(prompt(228, 1) + prompt(30, 10 + user), job_id=f"user{user}", max_tokens=90, context_limit=1000)
        job.system_tokens = 228
        reused.append(rig.run(job)[job.id].prefix_cache_tokens)
        rig.run(make_job(prompt(450, 30 + user), max_tokens=2, cache_prompt=False, context_limit=1000))
    assert reused[0] == 0
    assert min(reused[1:]) >= 228


@pytest.mark.parametrize(("model", "unified"), KINDS)
def test_an_evicted_prefix_is_loaded_from_host_memory(make_rig: Callable[..., Rig], model: str, unified: bool) -> None:
    rig, reference = make_rig(model, unified, host=True), make_rig(model, unified, cache=False)
    rig.run(*(make_job(prompt(150, at), job_id=f"turn1-{at}", max_tokens=6) for at in range(4)))
    rig.run(make_job(prompt(3, 99), max_tokens=8, cache_prompt=False))  # entries are evicted while other jobs run
    assert (rig.scheduler.cache_snapshot().entries, rig.scheduler.cache_snapshot().used_cells) == (0, 0)
    rig.samplers = {name: sampler for name, sampler in rig.samplers.items() if name.startswith("turn")}
    again = [make_job([*rig.history(f"turn1-{at}"), *prompt(9, 50 + at)], job_id=f"turn2-{at}") for at in range(4)]
    stats = rig.run(*(make_job(job.prompt, job_id=job.id, max_tokens=5) for job in again))
    assert {stat.prefix_cache_tier for stat in stats.values()} == {CacheTier.HOST}
    assert all(stat.prompt_tokens - stat.prefix_cache_tokens <= 10 for stat in stats.values())
    reference.run(*(make_job(prompt(150, at), job_id=f"turn1-{at}", max_tokens=6) for at in range(4)))
    reference.run(*(make_job(job.prompt, job_id=job.id, max_tokens=5) for job in again))
    assert_alike(rig, reference)


@pytest.mark.parametrize(("model", "unified"), KINDS)
def test_a_stored_prefix_is_loaded_up_to_a_token_in_its_middle_only_where_this_is_possible(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture, model: str, unified: bool
) -> None:
    rig = make_rig(model, unified, host=True)
    tokens = prompt(150, 1)
    rig.run(make_job([*tokens, *prompt(50, 2)], max_tokens=4))
    rig.run(make_job(prompt(3, 99), max_tokens=8, cache_prompt=False))  # entries are evicted while other jobs run
    stats = rig.run(make_job([*tokens, *prompt(50, 3)], job_id="other", max_tokens=4))["other"]
    n_loaded = {"recurrent": 128, "hybrid": 128, "sliding": 150 if unified else 0}.get(model, 150)
    assert stats.prefix_cache_tokens == n_loaded
    assert "cache.load_failed" not in caplog.text


@pytest.mark.parametrize("model", ["plain", "sliding"])
def test_a_block_for_which_too_few_cells_are_free_is_not_loaded(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture, model: str
) -> None:
    rig, reference = make_rig(model, True, host=True, n_ctx=256), make_rig(model, True, cache=False)
    stored = prompt(3 * BLOCK_TOKENS, 1)
    rig.run(make_job(stored, max_tokens=4))
    rig.run(make_job(prompt(3, 99), max_tokens=8, cache_prompt=False))  # entries are evicted while other jobs run
    rig.samplers.clear()

    def first() -> Job:
        return make_job(prompt(84, 2), job_id="first", max_tokens=8)

    def second() -> Job:
        return make_job([*stored[:-60], 7], job_id="second", max_tokens=4)

    rig.submit(first())
    while rig.scheduler.cache_snapshot().used_cells < 84:
        rig.tick()
    stats = rig.run(second())
    assert stats["second"].prefix_cache_tokens == 2 * BLOCK_TOKENS, "the last block needs more cells than are free"
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    reference.run(first(), second())
    assert_alike(rig, reference)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("model", ["recurrent", "hybrid"])
def test_a_prompt_whose_start_was_loaded_is_cached_up_to_its_end(
    make_rig: Callable[..., Rig], model: str, unified: bool
) -> None:
    rig = make_rig(model, unified, host=True)
    start, tokens = prompt(150, 1), prompt(150, 1) + prompt(100, 2)
    rig.run(make_job(start, max_tokens=4))
    rig.run(make_job(prompt(3, 99), max_tokens=8, cache_prompt=False))  # entries are evicted while other jobs run
    first = rig.run(make_job(tokens, job_id="first", max_tokens=4))["first"]
    again = rig.run(make_job(tokens, job_id="again", max_tokens=4))["again"]
    assert first.prefix_cache_tier is CacheTier.HOST
    assert again.prefix_cache_tokens == len(tokens) - 1


@pytest.mark.parametrize("model", ["recurrent", "hybrid"])
def test_a_state_is_cached_at_the_end_of_the_system_prompt_of_the_prompt_and_of_every_chunk(
    make_rig: Callable[..., Rig], model: str
) -> None:
    rig, reference = make_rig(model, True), make_rig(model, True, cache=False)
    system = prompt(50, 1)
    orders = {
        "first": system + prompt(100, 2),
        "same system": system + prompt(40, 3),
        "same prompt": system + prompt(100, 2),
        "same chunk": (system + prompt(100, 2))[:130] + prompt(30, 4),
    }
    hits = {}
    for job_id, tokens in orders.items():
        job = make_job(tokens, job_id=job_id, max_tokens=4)
        job.system_tokens = len(system)
        hits[job_id] = rig.run(job)[job_id].prefix_cache_tokens
        reference.run(make_job(tokens, job_id=job_id, max_tokens=4))
    assert hits == {"first": 0, "same system": 50, "same prompt": 149, "same chunk": 114}
    assert_alike(rig, reference)


@pytest.mark.parametrize("model", ["recurrent", "hybrid"])
def test_a_state_that_is_evicted_before_its_copy_was_computed_is_saved(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture, model: str
) -> None:
    """Each sequence belongs to a job or an entry, so none is free for a decode that would compute the copy."""
    rig = make_rig(model, False, host=True, n_slots=2, n_seq_max=4)
    for number in range(12):
        jobs = [make_job(prompt(60, 1) + prompt(150 + 10 * at, 3 * number + at), max_tokens=4) for at in range(3)]
        for job in jobs:
            job.system_tokens = 60
        rig.run(*jobs)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
