"""Slot states on llama.cpp, for every kind of memory: a job on a restored state has the same logits as without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.recording_sampler import RecordingSampler

from llamaq.common.errors import SlotCommandRefused
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.tools.random_gguf import MEMORY_KINDS, write_model
from llamaq.worker.core.outputs import JobEnded
from llamaq.worker.core.packed_tokens import pack
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.offload.block_transfers import BLOCK_TOKENS, BlockTransfers
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.slot_files.slot_operations import SlotOperations
from llamaq.worker.slot_files.slot_state_parts import join_parts, split_parts
from llamaq.worker.testing import make_job

NOISE = 0.02
"""Allowed difference of logits between batches of different shapes, as a share of their standard deviation."""
KINDS = [(model, unified) for model in sorted(MEMORY_KINDS) for unified in (True, False)]
PROMPT: list[int] = np.random.default_rng(1).integers(0, 500, 150).tolist()


class Setup:
    """A scheduler with a real engine, without threads and Redis."""

    def __init__(self, path: Path, *, unified: bool, host: bool = False, n_ctx: int = 2400) -> None:
        options = ContextOptions(
            n_ctx=n_ctx, n_batch=256, n_ubatch=64, n_seq_max=8, n_threads=1, n_threads_batch=1, kv_unified=unified
        )
        self.engine = engine = Engine(Model(path, ModelOptions(n_gpu_layers=0)), options)
        store = BlockStore(
            BLOCK_TOKENS if engine.sequences.can_save_parts else None, 10**8, can_cut=engine.sequences.can_cut_saved
        )
        offload = BlockTransfers(store, engine.sequences)
        memory = KvMemory(
            SlotPool(2, engine.context.n_ctx, engine.sequences.n_sequences, shares_cells=engine.context.kv_unified),
            engine.sequences,
            RadixPrefixCache(can_cut=engine.sequences.can_cut),
            offload,
            held_cells=0 if host else None,
        )
        guarded = GuardedStrategy(DecodeMaximal(), TickLimits(budget=256, chunk_size=64))
        self.scheduler = Scheduler(memory, guarded, end_tokens=frozenset())
        self.operations = SlotOperations(memory, engine.sequences, offload)

    def tick(self) -> list[JobEnded]:
        self.scheduler.admit()
        self.scheduler.move(0.001)
        batch = self.scheduler.plan()
        outputs = self.scheduler.apply(batch, self.engine.run(batch) if batch else []).outputs
        self.scheduler.check_integrity()
        return [output for output in outputs if isinstance(output, JobEnded)]

    def finish(self) -> None:
        """Tick until no job and no transfer is left."""
        while self.scheduler.has_work:
            self.tick()

    def run(self, prompt: list[int], slot: int = 0) -> tuple[JobStats, npt.NDArray[np.float32]]:
        """Run a job to its end. Returns its stats and the logits after its prompt."""
        job = make_job(prompt, max_tokens=5, slot=slot)
        sampler = RecordingSampler()
        job.sampler = sampler
        self.scheduler.submit(job)
        while not (ended := self.tick()):
            pass
        assert ended[0].error is None
        _, logits_of_first_token = sampler.draws[0]
        return ended[0].stats, logits_of_first_token

    def save(self, slot: int = 0) -> tuple[bytes, bytes]:
        """Save the state of a slot, with one tick before each step. Returns the tokens and the data of the state."""
        save = self.operations.begin_save(slot)
        while not save.is_complete:
            self.tick()
            disk_read = self.operations.saver.step(save)
            if disk_read is not None:
                save.add_awaited_part(disk_read.result())
        return save.tokens, join_parts(save.parts)

    def restore(self, tokens: bytes, data: bytes, slot: int = 0) -> None:
        job, parts = make_job([1]), split_parts(data, len(tokens) // 4)
        while (restore := self.operations.begin_restore(slot, tokens, job.scope, parts)) is None:
            self.tick()  # entries are evicted
        while not restore.is_complete:
            self.tick()
            self.operations.restorer.step(restore)
        self.scheduler.check_integrity()


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the random-weight model that the parameter of the test names."""
    folder = tmp_path_factory.getbasetemp() / "slot-kinds"
    folder.mkdir(exist_ok=True)
    file = folder / f"{request.param}.gguf"
    if not file.exists():
        write_model(file, MEMORY_KINDS[request.param], seed=3)
    return file


@pytest.fixture
def setups() -> Iterator[list[Setup]]:
    opened: list[Setup] = []
    yield opened
    for setup in opened:
        setup.engine.close()


@pytest.mark.parametrize(("path", "unified"), KINDS, indirect=["path"])
def test_a_restored_state_gives_the_logits_of_a_fresh_run(path: Path, unified: bool, setups: list[Setup]) -> None:
    setups += [Setup(path, unified=unified) for _ in range(2)]
    one, other = setups
    one.run(PROMPT)
    tokens, data = one.save()
    assert tokens.startswith(pack(PROMPT))
    turn = [*memoryview(tokens).cast("i"), 5, 6, 7]
    _, expected = other.run(turn)
    other.operations.erase(0)
    assert other.scheduler.cache_snapshot().entries == 0
    other.restore(tokens, data, slot=1)
    stats, logits = other.run(turn, slot=1)
    assert stats.prefix_cache_tokens == len(turn) - 3
    assert np.abs(logits - expected).max() < NOISE * expected.std()


@pytest.mark.parametrize(("path", "unified"), KINDS, indirect=["path"])
def test_states_of_a_running_job_and_from_host_memory_give_the_logits_of_a_fresh_run(
    path: Path, unified: bool, setups: list[Setup]
) -> None:
    setups += [Setup(path, unified=unified, host=True) for _ in range(2)]
    one, other = setups
    one.scheduler.submit(make_job(PROMPT, max_tokens=40, slot=0))
    while one.operations.snapshots()[0].generated_tokens < 9:
        one.tick()
    running = one.save()
    one.finish()
    one.scheduler.submit(make_job([9] * 20, max_tokens=2, slot=1))
    one.finish()
    assert one.scheduler.cache_snapshot().host_bytes > 0, "the entry was evicted from the device"
    assert one.operations.snapshots()[0].content_tokens > len(PROMPT)
    ended = one.save()
    for tokens, data in (running, ended):
        turn = [*memoryview(tokens).cast("i"), 5, 6, 7]
        _, expected = other.run(turn)
        other.operations.erase(0)
        other.restore(tokens, data)
        stats, logits = other.run(turn)
        assert stats.prefix_cache_tokens == len(turn) - 3
        assert np.abs(logits - expected).max() < NOISE * expected.std()
        other.operations.erase(0)


@pytest.mark.parametrize(("path", "unified"), KINDS, indirect=["path"])
def test_each_saved_state_of_which_another_sequence_holds_more_tokens_can_be_restored(
    path: Path, unified: bool, setups: list[Setup]
) -> None:
    setups += [Setup(path, unified=unified), Setup(path, unified=unified)]
    setup, other = setups
    setup.run(PROMPT, slot=0)
    history = np.frombuffer(setup.scheduler._memory.slots[0].content, np.int32).tolist()
    setup.run([*history[:-1], *PROMPT[:40]], slot=1)  # the sequence of the first job is part of this one now
    if path.stem == "sliding" and not unified:
        with pytest.raises(SlotCommandRefused, match="slot 0 has no state"):
            setup.save(slot=0)
        return
    tokens, data = setup.save(slot=0)
    other.restore(tokens, data)
    assert len(tokens) // 4 == len(history) - 1


@pytest.mark.parametrize("path", ["plain"], indirect=True)
def test_entries_are_evicted_to_load_a_part_that_the_device_holds_in_part(path: Path, setups: list[Setup]) -> None:
    setups.append(setup := Setup(path, unified=True, n_ctx=256))
    setup.run(PROMPT[:120])
    tokens, data = setup.save()
    first = split_parts(data, len(tokens) // 4)[-1].first
    assert len(tokens) // 4 == 124, "n_ctx is chosen for this length"
    setup.operations.erase(0)
    setup.run([9] * 110, slot=1)
    setup.run(PROMPT[:112], slot=0)
    n_free = 256 - setup.scheduler.cache_snapshot().used_cells
    assert 124 - 112 <= n_free < 124 - first, "there is room for the missing cells, but not for the part with them"
    setup.restore(tokens, data)
    assert setup.run(PROMPT)[0].prefix_cache_tokens >= 120
