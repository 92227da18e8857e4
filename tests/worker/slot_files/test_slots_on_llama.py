"""Slots' states on the real library, for every kind of memory: what was put back gives the logits of a fresh run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from llamaq.common.protocol.job_outcome import JobStats
from llamaq.tools.random_gguf import MEMORY_KINDS, write_model
from llamaq.worker.core.job import JobEnded
from llamaq.worker.core.tokens import pack
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import ContextOptions, Model
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.prefix_cache import RadixPrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.offload.block_transfers import BLOCK_TOKENS, BlockTransfers
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.slot_files.slot_operations import SlotOperations
from llamaq.worker.slot_files.state_parts import join_parts, split_parts
from llamaq.worker.testing.fake_engine import GreedySampler, make_job

NOISE = 0.02
"""Share of the logits' standard deviation that the shape of a batch may move them by."""
KINDS = [(model, unified) for model in sorted(MEMORY_KINDS) for unified in (True, False)]
PROMPT: list[int] = np.random.default_rng(1).integers(0, 500, 150).tolist()


class Witness(GreedySampler):
    """Remembers the logits that the first token was drawn from."""

    def __init__(self) -> None:
        super().__init__()
        self.first: npt.NDArray[np.float32] | None = None

    def sample(self, logits: npt.NDArray[np.float32], history: Sequence[int], n_prompt: int) -> int:
        if self.first is None:
            self.first = logits.copy()
        return super().sample(logits, history, n_prompt)


class Rig:
    """A scheduler on a real engine, without a worker around it."""

    def __init__(self, path: Path, *, unified: bool, host: bool = False) -> None:
        options = ContextOptions(
            n_ctx=2400, n_batch=256, n_ubatch=64, n_seq_max=8, n_threads=1, n_threads_batch=1, kv_unified=unified
        )
        self.engine = engine = Engine(Model(path, n_gpu_layers=0), options)
        tree = BlockStore(BLOCK_TOKENS if engine.sequences.in_blocks else None, 10**8, can_cut=engine.sequences.can_cut)
        tiers = BlockTransfers(tree, engine.sequences)
        self.scheduler = Scheduler(
            SlotPool(2, engine.context.n_ctx, engine.sequences.n_sequences, shares_cells=engine.context.kv_unified),
            engine.sequences,
            budget=256,
            chunk_size=64,
            end_tokens=frozenset(),
            cache=RadixPrefixCache(can_cut=engine.sequences.can_cut),
            tiers=tiers,
            held_cells=0 if host else None,
        )
        self.states = SlotOperations(self.scheduler.memory, engine.sequences, tiers)

    def tick(self) -> list[JobEnded]:
        self.scheduler.admit()
        self.scheduler.move(0.001)
        batch = self.scheduler.plan()
        outputs = self.scheduler.apply(batch, self.engine.run(batch) if batch else [])
        self.scheduler.check_integrity()
        return [output for output in outputs if isinstance(output, JobEnded)]

    def finish(self) -> None:
        """Tick until nothing is left to do."""
        while self.scheduler.has_work:
            self.tick()

    def run(self, prompt: list[int], slot: int = 0) -> tuple[JobStats, npt.NDArray[np.float32]]:
        """Run a job to its end; its stats, and the logits after its prompt."""
        job = make_job(prompt, max_tokens=5, slot=slot)
        witness = Witness()
        job.sampler = witness
        self.scheduler.submit(job)
        while not (ended := self.tick()):
            pass
        assert ended[0].error is None
        assert witness.first is not None
        return ended[0].stats, witness.first

    def save(self, slot: int = 0) -> tuple[bytes, bytes]:
        """Tokens and data of a slot's state, with a tick between any two steps."""
        save = self.states.begin_save(slot)
        while not save.is_complete:
            self.tick()
            coming = self.states.saver.step(save)
            if coming is not None:
                save.add_awaited_part(coming.result())
        return save.tokens, join_parts(save.parts)

    def restore(self, tokens: bytes, data: bytes, slot: int = 0) -> None:
        job = make_job([1])
        restore = self.states.begin_restore(slot, tokens, job.scope, split_parts(data, len(tokens) // 4))
        assert restore is not None
        while not restore.is_complete:
            self.tick()
            self.states.restorer.step(restore)
        self.scheduler.check_integrity()


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random-weight model that the test's parameter names."""
    folder = tmp_path_factory.getbasetemp() / "slot-kinds"
    folder.mkdir(exist_ok=True)
    file = folder / f"{request.param}.gguf"
    if not file.exists():
        write_model(file, MEMORY_KINDS[request.param], seed=3)
    return file


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    opened: list[Rig] = []
    yield opened
    for rig in opened:
        rig.engine.close()


@pytest.mark.parametrize(("path", "unified"), KINDS, indirect=["path"])
def test_a_state_that_was_put_back_gives_the_logits_of_a_fresh_run(path: Path, unified: bool, rigs: list[Rig]) -> None:
    rigs += [Rig(path, unified=unified) for _ in range(2)]
    one, other = rigs
    one.run(PROMPT)
    tokens, data = one.save()
    assert tokens.startswith(pack(PROMPT))
    turn = [*memoryview(tokens).cast("i"), 5, 6, 7]
    _, expected = other.run(turn)
    other.states.erase(0)
    assert other.scheduler.cache_snapshot().entries == 0
    other.restore(tokens, data, slot=1)
    stats, logits = other.run(turn, slot=1)
    assert stats.prefix_cache_tokens == len(turn) - 3
    assert np.abs(logits - expected).max() < NOISE * expected.std()


@pytest.mark.parametrize(("path", "unified"), KINDS, indirect=["path"])
def test_the_state_of_a_running_job_and_that_from_host_memory_are_as_good(
    path: Path, unified: bool, rigs: list[Rig]
) -> None:
    rigs += [Rig(path, unified=unified, host=True) for _ in range(2)]
    one, other = rigs
    one.scheduler.submit(make_job(PROMPT, max_tokens=40, slot=0))
    while one.states.snapshots()[0].generated_tokens < 9:
        one.tick()
    running = one.save()
    one.finish()
    one.scheduler.submit(make_job([9] * 20, max_tokens=2, slot=1))
    one.finish()
    assert one.scheduler.cache_snapshot().host_bytes > 0, "it has left the device"
    assert one.states.snapshots()[0].content_tokens > len(PROMPT)
    ended = one.save()
    for tokens, data in (running, ended):
        turn = [*memoryview(tokens).cast("i"), 5, 6, 7]
        _, expected = other.run(turn)
        other.states.erase(0)
        other.restore(tokens, data)
        stats, logits = other.run(turn)
        assert stats.prefix_cache_tokens == len(turn) - 3
        assert np.abs(logits - expected).max() < NOISE * expected.std()
        other.states.erase(0)
