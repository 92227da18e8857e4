"""Saves, restores and erases of slot states, on a fake engine whose cells record their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from llamaq.common.errors import SlotCommandRefused
from llamaq.common.protocol.job_outcome import CacheTier, JobStats
from llamaq.worker.core.cache_scope import Scope, namespace_key
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded
from llamaq.worker.core.packed_tokens import TOKEN_BYTES, pack
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.offload_interface import NoOffload, Offload
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.slot_files.slot_operations import SlotOperations
from llamaq.worker.slot_files.slot_restorer import SlotRestore
from llamaq.worker.slot_files.slot_saver import SlotSave
from llamaq.worker.slot_files.slot_state_parts import SlotStatePart, join_parts, split_parts
from llamaq.worker.testing import FakeEngine, make_job, make_memory, make_scheduler, run_tick, run_to_end

LONG = [7 + at % 200 for at in range(300)]
KINDS = [(True, True), (True, False), (False, True)]
"""Kinds of KV memory: `can_cut` and `kv_unified`."""


@dataclass
class Setup:
    """The parts of a worker that slot operations need, without threads, Redis or a model."""

    engine: FakeEngine
    scheduler: Scheduler
    operations: SlotOperations
    offload: Offload

    def run(self, prompt: list[int], *, scope: Scope | None = None, max_tokens: int = 4, slot: int = 0) -> JobStats:
        """Run a job to its end."""
        job = make_job(prompt, max_tokens=max_tokens, slot=slot)
        job.scope = scope or Scope()
        self.scheduler.submit(job)
        [ended] = [output for output in run_to_end(self.scheduler, self.engine) if isinstance(output, JobEnded)]
        return ended.stats

    def save(self, slot: int = 0, between: Callable[[], object] = lambda: None) -> SlotSave:
        """Save the state of a slot. `between` is called before every step."""
        save = self.operations.begin_save(slot)
        while not save.is_complete:
            between()
            disk_read = self.operations.saver.step(save)
            if disk_read is not None:
                save.add_awaited_part(disk_read.result())
        return save

    def restore(self, save: SlotSave, slot: int = 0, between: Callable[[], object] = lambda: None) -> SlotRestore:
        """Restore a saved state from its encoded parts. `between` is called before every step."""
        parts = split_parts(join_parts(save.parts), save.n_tokens)
        scope = Scope(public=save.scope.public, hashed=save.scope.key)
        for _ in range(100):
            restore = self.operations.begin_restore(slot, save.tokens, scope, parts)
            if restore is not None:
                break
            self.scheduler.move(0)
        assert restore is not None
        while not restore.is_complete:
            self.scheduler.check_integrity()
            between()
            self.operations.restorer.step(restore)
        self.scheduler.check_integrity()
        return restore

    def content_tokens(self, slot: int = 0) -> int:
        return self.operations.snapshots()[slot].content_tokens


def make(
    *,
    can_cut: bool = True,
    kv_unified: bool = True,
    n_ctx: int = 4000,
    n_slots: int = 2,
    host_bytes: int = 0,
    held_cells: int | None = None,
) -> Setup:
    engine = FakeEngine(n_ctx=n_ctx, n_batch=512, n_seq_max=9, can_cut=can_cut, kv_unified=kv_unified)
    store = BlockStore(64 if engine.sequences.can_save_parts else None, host_bytes, can_cut=can_cut)
    offload: Offload = BlockTransfers(store, engine.sequences) if host_bytes else NoOffload()
    memory = make_memory(
        engine,
        n_slots=n_slots,
        cache=RadixPrefixCache(can_cut=can_cut),
        offload=offload,
        held_cells=held_cells,
        similarity=0.1,
    )
    scheduler = make_scheduler(engine, memory, chunk_size=128)
    seconds = itertools.count(0.0)
    operations = SlotOperations(
        memory, engine.sequences, offload, clock=lambda: next(seconds)
    )  # one block in each step
    return Setup(engine, scheduler, operations, offload)


@pytest.mark.parametrize(("can_cut", "kv_unified"), KINDS)
def test_a_state_saved_by_one_worker_is_a_cache_hit_in_another(can_cut: bool, kv_unified: bool) -> None:
    one, other = (make(can_cut=can_cut, kv_unified=kv_unified) for _ in range(2))
    one.run(LONG)
    save = one.save()
    assert save.n_tokens == 303, "the last token of a job has no KV cell"
    assert len(save.parts) == (5 if one.engine.sequences.can_save_parts else 1)
    other.restore(save, slot=1)
    assert other.content_tokens(1) == 303
    turn = [*memoryview(save.tokens).cast("i"), *[9] * 20]
    assert turn[:300] == LONG
    stats = other.run(turn, slot=1)
    assert (stats.prefix_cache_tokens, stats.prefix_cache_tier) == (303, CacheTier.DEVICE)


def test_the_saved_state_of_a_running_job_is_its_state_when_the_save_begins() -> None:
    setup = make()
    setup.scheduler.submit(make_job(LONG, max_tokens=8, slot=0))
    while setup.operations.snapshots()[0].state != "decode":
        run_tick(setup.scheduler, setup.engine)
    save = setup.save(between=lambda: run_tick(setup.scheduler, setup.engine))
    assert save.n_tokens == 300
    assert setup.operations.snapshots()[0].generated_tokens > 1
    run_to_end(setup.scheduler, setup.engine)
    assert make().restore(save).is_complete


def test_an_idle_worker_that_saves_cells_ahead_keeps_the_blocks_of_a_state_that_is_being_saved() -> None:
    setup = make(host_bytes=6800, held_cells=0)
    setup.run(LONG)
    setup.scheduler.submit(make_job([255] * 3, max_tokens=20, cache_prompt=False, slot=1))
    run_to_end(setup.scheduler, setup.engine)
    setup.run([5] * 300, slot=1)
    n_ahead = 0

    def save_ahead() -> None:
        nonlocal n_ahead
        n_ahead += setup.scheduler.save_ahead()

    assert setup.save(between=save_ahead).n_tokens == 303
    assert n_ahead == 0
    setup.run([6] * 300, slot=1)
    assert setup.scheduler.save_ahead(), "the cache has changed"


@pytest.mark.parametrize(("can_cut", "kv_unified"), KINDS)
def test_the_state_of_a_running_job_is_restored_for_every_kind_of_memory(can_cut: bool, kv_unified: bool) -> None:
    setup, other = make(can_cut=can_cut, kv_unified=kv_unified), make(can_cut=can_cut, kv_unified=kv_unified)
    setup.scheduler.submit(make_job(LONG, max_tokens=50, slot=0))
    while setup.operations.snapshots()[0].generated_tokens < 10:
        run_tick(setup.scheduler, setup.engine)
    save = setup.save(between=lambda: run_tick(setup.scheduler, setup.engine))
    other.restore(save)
    turn = [*memoryview(save.tokens).cast("i"), 1, 2, 3]
    assert other.run(turn).prefix_cache_tokens == 309


def test_a_state_is_saved_from_host_memory_and_during_its_move_there() -> None:
    setup = make(host_bytes=10**7, n_ctx=700)
    setup.run(LONG)
    busy = make_job([5] * 500, max_tokens=50, slot=1)

    steps: list[int] = []

    def evict_after_two_steps() -> None:
        steps.append(len(steps))
        if len(steps) == 2:
            setup.scheduler.submit(busy)
            while setup.scheduler.cache_snapshot().entries:
                run_tick(setup.scheduler, setup.engine)

    save = setup.save(between=evict_after_two_steps)
    saves = [call for call in setup.engine.sequences.calls if call[0] == "save"]
    assert (len(steps), len(saves)) == (5, 6), "one block saved by the command, five by the offload"
    assert save.n_tokens == 303
    run_to_end(setup.scheduler, setup.engine)
    assert setup.scheduler.cache_snapshot().host_bytes > 0
    again = setup.save()
    assert again.tokens == save.tokens
    make().restore(again)
    make().restore(save)


def test_a_state_that_was_evicted_from_all_tiers_cannot_be_saved() -> None:
    setup = make(n_ctx=400)
    with pytest.raises(SlotCommandRefused, match="slot 0 has no state"):
        setup.operations.begin_save(0)
    setup.run(LONG)
    setup.run([5] * 350, slot=1)
    with pytest.raises(SlotCommandRefused, match="slot 0 has no state"):
        setup.operations.begin_save(0)
    setup.run(LONG)
    save = setup.operations.begin_save(0)
    setup.operations.erase(0)
    with pytest.raises(SlotCommandRefused, match="left the cache while"):
        setup.operations.saver.step(save)


def test_a_failing_engine_refuses_the_command() -> None:
    setup = make()
    setup.run(LONG)
    setup.engine.sequences.fail_saves()
    with pytest.raises(SlotCommandRefused, match="injected failure"):
        setup.save()
    assert setup.save().is_complete


def test_a_restored_state_is_used_only_in_its_scope_although_only_the_hash_of_the_scope_is_stored() -> None:
    one, other = make(), make()
    salted = Scope("tenant", 100)
    one.run(LONG, scope=salted)
    save = one.save()
    assert Scope(public=100, hashed=namespace_key("tenant")).key == salted.key
    other.restore(save)
    assert other.run(LONG).prefix_cache_tokens == 0
    other = make()
    other.restore(save)
    assert other.run(LONG, scope=Scope("stranger", 80)).prefix_cache_tokens == 80, "the public tokens"
    other = make()
    other.restore(save)
    assert other.run(LONG, scope=Scope("tenant")).prefix_cache_tokens == 299


def test_cells_that_are_on_the_device_are_shared_and_not_loaded() -> None:
    one, other = make(), make()
    one.run(LONG)
    save = one.save()
    other.run([*LONG[:200], *[3] * 50])
    used = other.scheduler.cache_snapshot().used_cells
    other.restore(save, slot=1)
    assert other.scheduler.cache_snapshot().used_cells == used + 103
    loads = [call for call in other.engine.sequences.calls if call[0] == "load"]
    assert [call[2:] for call in loads] == [(200, 256), (256, 303)]
    other.restore(save, slot=0)
    assert len([call for call in other.engine.sequences.calls if call[0] == "load"]) == len(loads)
    assert other.content_tokens(0) == 303


def test_a_state_that_a_running_job_holds_is_restored_without_loading() -> None:
    setup = make()
    setup.run(LONG)
    save = setup.save()
    setup.operations.erase(0)
    turn = [*memoryview(save.tokens).cast("i"), *[1] * 9]
    setup.scheduler.submit(make_job(turn, max_tokens=30, slot=0))
    while setup.operations.snapshots()[0].state != "decode":
        run_tick(setup.scheduler, setup.engine)
    setup.restore(save, slot=1)
    assert not [call for call in setup.engine.sequences.calls if call[0] == "load"]
    assert setup.content_tokens(1) == 303
    run_to_end(setup.scheduler, setup.engine)


def test_entries_are_evicted_for_a_restore_but_running_jobs_are_not_preempted() -> None:
    one = make()
    one.run(LONG)
    save = one.save()
    other = make(n_ctx=400, host_bytes=10**7)
    other.run([5] * 350)
    other.restore(save, slot=1)
    assert other.run([5] * 351).prefix_cache_tier is CacheTier.HOST, "the evicted entry moved to host memory"
    other = make(n_ctx=400)
    other.scheduler.submit(make_job([5] * 150, max_tokens=50, slot=0))
    run_tick(other.scheduler, other.engine)
    with pytest.raises(SlotCommandRefused, match="no room for 303 tokens beside"):
        other.restore(save, slot=1)
    run_to_end(other.scheduler, other.engine)
    with pytest.raises(SlotCommandRefused, match="does not fit into 200 cells"):
        make(n_ctx=200).restore(save)


@pytest.mark.parametrize(("can_cut", "kv_unified"), KINDS)
def test_a_refused_restore_leaves_no_entry_and_no_cells(can_cut: bool, kv_unified: bool) -> None:
    one, other = (make(can_cut=can_cut, kv_unified=kv_unified) for _ in range(2))
    one.run(LONG)
    save = one.save()
    other.engine.sequences.fail_loads()
    restore = other.operations.begin_restore(0, save.tokens, save.scope, save.parts)
    assert restore is not None
    with pytest.raises(SlotCommandRefused, match="refuses this state"):
        other.operations.restorer.step(restore)
    other.operations.restorer.cancel(restore)
    other.operations.restorer.cancel(restore)
    other.scheduler.check_integrity()
    assert (other.scheduler.cache_snapshot().entries, other.engine.sequences.memory, other.content_tokens()) == (
        0,
        {},
        0,
    )
    assert other.run(LONG).prefix_cache_tokens == 0


def test_close_removes_incomplete_restores() -> None:
    one, other = make(), make()
    one.run(LONG)
    save = one.save()
    restore = other.operations.begin_restore(0, save.tokens, save.scope, save.parts)
    assert restore is not None
    other.operations.restorer.step(restore)
    assert 0 < restore.n_restored < restore.n_tokens
    assert other.run(LONG).prefix_cache_tokens == 0, "no job finds an incomplete state"
    other.operations.restorer.close()
    assert other.scheduler.cache_snapshot().entries == 1
    with pytest.raises(SlotCommandRefused, match="was evicted during"):
        other.operations.restorer.step(restore)


def test_jobs_that_arrive_during_a_restore_wait_for_it_and_succeed() -> None:
    one = make()
    one.run(LONG)
    save = one.save()
    other = make(n_ctx=420)
    late = make_job([5] * 390, max_tokens=4, slot=1)
    submitted: list[Job] = []

    def submit_and_tick() -> None:
        if not submitted:
            submitted.append(late)
            other.scheduler.submit(late)
        run_tick(other.scheduler, other.engine)

    other.restore(save, between=submit_and_tick)
    [ended] = [output for output in run_to_end(other.scheduler, other.engine) if isinstance(output, JobEnded)]
    assert ended.job is late
    assert ended.error is None


@pytest.mark.parametrize(("can_cut", "kv_unified"), KINDS)
def test_an_idle_worker_does_not_save_a_state_ahead_before_it_is_restored(can_cut: bool, kv_unified: bool) -> None:
    one = make(can_cut=can_cut, kv_unified=kv_unified)
    one.run(LONG)
    save = one.save()
    other = make(can_cut=can_cut, kv_unified=kv_unified, host_bytes=10**7, held_cells=0)
    saved: list[bool] = []
    other.restore(save, between=lambda: saved.append(other.scheduler.save_ahead()))
    assert not any(saved)
    assert other.scheduler.save_ahead(), "the next job evicts the restored state"
    assert other.run(LONG).prefix_cache_tokens == (299 if can_cut else 0)


def test_erase_removes_the_content_of_the_slot_but_not_what_other_entries_share() -> None:
    setup = make(host_bytes=10**7)
    setup.run(LONG)
    setup.run([*LONG[:200], *[3] * 50], slot=1)
    assert setup.operations.erase(0) == 304
    setup.scheduler.check_integrity()
    assert setup.content_tokens(0) == 0
    assert setup.run(LONG).prefix_cache_tokens == 200
    assert setup.operations.erase(0) == 304
    assert setup.operations.erase(0) == 0


def test_erase_removes_blocks_in_host_memory() -> None:
    setup = make(host_bytes=10**7, n_ctx=400)
    setup.run(LONG, scope=Scope("a", 64))
    setup.run([5] * 350, slot=1)
    assert setup.scheduler.cache_snapshot().host_bytes > 0
    before = setup.offload.match(pack(LONG), Scope("a", 64))
    assert before is not None
    assert before.n_tokens == 300
    assert setup.operations.erase(0) == 304
    left = setup.offload.match(pack(LONG), Scope("a", 64))
    assert left is not None
    assert left.n_tokens == 64, "public blocks stay"
    setup.offload.check_integrity()
    with pytest.raises(SlotCommandRefused, match="no state"):
        setup.operations.begin_save(0)


def test_erase_removes_the_checkpoints_of_a_recurrent_state() -> None:
    setup = make(can_cut=False, host_bytes=10**7)
    setup.run(LONG)
    assert setup.scheduler.cache_snapshot().entries >= 3
    setup.operations.erase(0)
    assert setup.scheduler.cache_snapshot().entries == 0
    setup.scheduler.check_integrity()
    assert setup.run(LONG).prefix_cache_tokens == 0


def test_a_running_slot_is_neither_erased_nor_restored_and_an_unknown_slot_is_refused() -> None:
    setup = make()
    setup.run(LONG)
    save = setup.save()
    job = make_job([5] * 20, max_tokens=9, slot=0)
    setup.scheduler.submit(job)
    run_tick(setup.scheduler, setup.engine)
    with pytest.raises(SlotCommandRefused, match=f"slot 0 is running job {job.id}"):
        setup.operations.erase(0)
    with pytest.raises(SlotCommandRefused, match="slot 0 is running"):
        setup.operations.begin_restore(0, save.tokens, save.scope, save.parts)
    for call in (setup.operations.erase, setup.operations.begin_save):
        with pytest.raises(SlotCommandRefused, match="no slot 2: the worker has 2"):
            call(2)
    run_to_end(setup.scheduler, setup.engine)


def test_parts_are_decoded_as_they_were_encoded_and_damaged_data_is_an_error() -> None:
    parts = [SlotStatePart(0, 64, b"one"), SlotStatePart(0, 80, b""), SlotStatePart(80, 90, b"three")]
    data = join_parts(parts)
    assert [(part.first, part.end, bytes(part.data)) for part in split_parts(data, 90)] == [
        (part.first, part.end, bytes(part.data)) for part in parts
    ]
    for bad, n_tokens in ((data, 91), (data[:-1], 90), (data[:30], 90), (data + b"x", 90), (b"", 1)):
        with pytest.raises(ValueError, match="part"):
            split_parts(bad, n_tokens)
    with pytest.raises(ValueError, match="previous part"):
        split_parts(join_parts([parts[0], parts[2]]), 90)
    assert TOKEN_BYTES == 4
