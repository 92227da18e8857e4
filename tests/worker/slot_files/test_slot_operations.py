"""The states of slots: read out, put back and forgotten, on an engine whose cells know their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from llamaq.common.errors import SlotCommandRefused
from llamaq.common.protocol.job_outcome import CacheTier, JobStats
from llamaq.worker.core.cache_scope import Scope, namespace_key
from llamaq.worker.core.job import Job, JobEnded
from llamaq.worker.core.tokens import TOKEN_BYTES, pack
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.offload_interface import NoOffload, Offload
from llamaq.worker.kv_cache.prefix_cache import RadixPrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.slot_files.restore_slot import SlotRestore
from llamaq.worker.slot_files.save_slot import SlotSave
from llamaq.worker.slot_files.slot_operations import SlotOperations
from llamaq.worker.slot_files.state_parts import StatePart, join_parts, split_parts
from llamaq.worker.testing.fake_engine import FakeEngine, make_job, run_tick, run_to_end

LONG = [7 + at % 200 for at in range(300)]
KINDS = [(True, True), (True, False), (False, True)]
"""Of memory: `can_cut` and `kv_unified`."""


@dataclass
class Rig:
    """A worker without a thread, a Redis or a model."""

    engine: FakeEngine
    scheduler: Scheduler
    states: SlotOperations
    tiers: Offload

    def run(self, prompt: list[int], *, scope: Scope | None = None, max_tokens: int = 4, slot: int = 0) -> JobStats:
        """Run a job to its end."""
        job = make_job(prompt, max_tokens=max_tokens, slot=slot)
        job.scope = scope or Scope()
        self.scheduler.submit(job)
        [ended] = [output for output in run_to_end(self.scheduler, self.engine) if isinstance(output, JobEnded)]
        return ended.stats

    def read(self, slot: int = 0, between: Callable[[], object] = lambda: None) -> SlotSave:
        """Read a slot's state to its end; something happens between two steps."""
        save = self.states.begin_save(slot)
        while not save.is_complete:
            between()
            coming = self.states.saver.step(save)
            if coming is not None:
                save.add_awaited_part(coming.result())
        return save

    def put(self, save: SlotSave, slot: int = 0, between: Callable[[], object] = lambda: None) -> SlotRestore:
        """Put it to its end, by way of the bytes of a file, once there is room."""
        parts = split_parts(join_parts(save.parts), save.n_tokens)
        scope = Scope(public=save.scope.public, hashed=save.scope.key)
        for _ in range(100):
            restore = self.states.begin_restore(slot, save.tokens, scope, parts)
            if restore is not None:
                break
            self.scheduler.move(0)
        assert restore is not None
        while not restore.is_complete:
            self.scheduler.check_integrity()
            between()
            self.states.restorer.step(restore)
        self.scheduler.check_integrity()
        return restore

    def content(self, slot: int = 0) -> int:
        return self.states.snapshots()[slot].content_tokens


def make(
    *,
    can_cut: bool = True,
    kv_unified: bool = True,
    n_ctx: int = 4000,
    n_slots: int = 2,
    host_bytes: int = 0,
    held_cells: int | None = None,
) -> Rig:
    engine = FakeEngine(n_ctx=n_ctx, n_batch=512, n_seq_max=9, can_cut=can_cut, kv_unified=kv_unified)
    tree = BlockStore(64 if engine.sequences.in_blocks else None, host_bytes, can_cut=can_cut)
    tiers: Offload = BlockTransfers(tree, engine.sequences) if host_bytes else NoOffload()
    scheduler = Scheduler(
        SlotPool(n_slots, n_ctx, engine.sequences.n_sequences, similarity=0.1, shares_cells=kv_unified),
        engine.sequences,
        budget=512,
        chunk_size=128,
        end_tokens=engine.vocab.end_tokens,
        cache=RadixPrefixCache(can_cut=can_cut),
        tiers=tiers,
        held_cells=held_cells,
    )
    states = SlotOperations(scheduler.memory, engine.sequences, tiers)
    ticking = itertools.count()
    states.saver._clock = states.restorer._clock = lambda: float(next(ticking))  # one block a step
    return Rig(engine, scheduler, states, tiers)


@pytest.mark.parametrize(("can_cut", "kv_unified"), KINDS)
def test_what_was_read_in_one_worker_is_a_hit_in_another(can_cut: bool, kv_unified: bool) -> None:
    one, other = (make(can_cut=can_cut, kv_unified=kv_unified) for _ in range(2))
    one.run(LONG)
    save = one.read()
    assert save.n_tokens == 303, "the last token has no cell"
    assert len(save.parts) == (5 if one.engine.sequences.in_blocks else 1)
    other.put(save, slot=1)
    assert other.content(1) == 303
    turn = [*memoryview(save.tokens).cast("i"), *[9] * 20]
    assert turn[:300] == LONG
    stats = other.run(turn, slot=1)
    assert (stats.prefix_cache_tokens, stats.prefix_cache_tier) == (303, CacheTier.DEVICE)


def test_the_state_of_a_running_job_is_what_it_had_when_it_was_asked_for() -> None:
    rig = make()
    rig.scheduler.submit(make_job(LONG, max_tokens=8, slot=0))
    while rig.states.snapshots()[0].state != "decode":
        run_tick(rig.scheduler, rig.engine)
    save = rig.read(between=lambda: run_tick(rig.scheduler, rig.engine))
    assert save.n_tokens == 300
    assert rig.states.snapshots()[0].generated_tokens > 1
    run_to_end(rig.scheduler, rig.engine)
    assert make().put(save).is_complete


@pytest.mark.parametrize(("can_cut", "kv_unified"), KINDS)
def test_a_running_job_is_read_whole_where_memory_is_not_saved_in_parts(can_cut: bool, kv_unified: bool) -> None:
    rig, other = make(can_cut=can_cut, kv_unified=kv_unified), make(can_cut=can_cut, kv_unified=kv_unified)
    rig.scheduler.submit(make_job(LONG, max_tokens=50, slot=0))
    while rig.states.snapshots()[0].generated_tokens < 10:
        run_tick(rig.scheduler, rig.engine)
    save = rig.read(between=lambda: run_tick(rig.scheduler, rig.engine))
    other.put(save)
    turn = [*memoryview(save.tokens).cast("i"), 1, 2, 3]
    assert other.run(turn).prefix_cache_tokens == 309


def test_a_state_is_read_from_host_memory_and_while_it_moves_there() -> None:
    rig = make(host_bytes=10**7, n_ctx=700)
    rig.run(LONG)
    busy = make_job([5] * 500, max_tokens=50, slot=1)

    steps: list[int] = []

    def crowd() -> None:
        steps.append(len(steps))
        if len(steps) == 2:
            rig.scheduler.submit(busy)
            while rig.scheduler.cache_snapshot().entries:
                run_tick(rig.scheduler, rig.engine)

    save = rig.read(between=crowd)
    saves = [call for call in rig.engine.sequences.calls if call[0] == "save"]
    assert (len(steps), len(saves)) == (5, 6), "one by the reader, five by what moved it"
    assert save.n_tokens == 303
    run_to_end(rig.scheduler, rig.engine)
    assert rig.scheduler.cache_snapshot().host_bytes > 0
    again = rig.read()
    assert again.tokens == save.tokens
    make().put(again)
    make().put(save)


def test_what_has_left_every_tier_cannot_be_read() -> None:
    rig = make(n_ctx=400)
    with pytest.raises(SlotCommandRefused, match="slot 0 has no state"):
        rig.states.begin_save(0)
    rig.run(LONG)
    rig.run([5] * 350, slot=1)
    with pytest.raises(SlotCommandRefused, match="slot 0 has no state"):
        rig.states.begin_save(0)
    rig.run(LONG)
    save = rig.states.begin_save(0)
    rig.states.erase(0)
    with pytest.raises(SlotCommandRefused, match="left the cache while"):
        rig.states.saver.step(save)


def test_an_engine_that_cannot_save_is_an_answer_and_no_crash() -> None:
    rig = make()
    rig.run(LONG)
    rig.engine.sequences.fail_saves()
    with pytest.raises(SlotCommandRefused, match="told to fail"):
        rig.read()
    assert rig.read().is_complete


def test_a_state_goes_back_to_its_scope_alone_though_its_salt_is_not_known() -> None:
    one, other = make(), make()
    salted = Scope("tenant", 100)
    one.run(LONG, scope=salted)
    save = one.read()
    assert Scope(public=100, hashed=namespace_key("tenant")).key == salted.key
    other.put(save)
    assert other.run(LONG).prefix_cache_tokens == 0
    other = make()
    other.put(save)
    assert other.run(LONG, scope=Scope("stranger", 80)).prefix_cache_tokens == 80, "what is public"
    other = make()
    other.put(save)
    assert other.run(LONG, scope=Scope("tenant")).prefix_cache_tokens == 299


def test_what_is_there_already_is_shared_and_not_loaded() -> None:
    one, other = make(), make()
    one.run(LONG)
    save = one.read()
    other.run([*LONG[:200], *[3] * 50])
    used = other.scheduler.cache_snapshot().used_cells
    other.put(save, slot=1)
    assert other.scheduler.cache_snapshot().used_cells == used + 103
    loads = [call for call in other.engine.sequences.calls if call[0] == "load"]
    assert [call[2:] for call in loads] == [(200, 256), (256, 303)]
    other.put(save, slot=0)
    assert len([call for call in other.engine.sequences.calls if call[0] == "load"]) == len(loads)
    assert other.content(0) == 303


def test_what_a_running_job_holds_is_put_without_loading() -> None:
    rig = make()
    rig.run(LONG)
    save = rig.read()
    rig.states.erase(0)
    turn = [*memoryview(save.tokens).cast("i"), *[1] * 9]
    rig.scheduler.submit(make_job(turn, max_tokens=30, slot=0))
    while rig.states.snapshots()[0].state != "decode":
        run_tick(rig.scheduler, rig.engine)
    rig.put(save, slot=1)
    assert not [call for call in rig.engine.sequences.calls if call[0] == "load"]
    assert rig.content(1) == 303
    run_to_end(rig.scheduler, rig.engine)


def test_entries_give_way_to_a_state_and_nothing_that_runs_does() -> None:
    one = make()
    one.run(LONG)
    save = one.read()
    other = make(n_ctx=400, host_bytes=10**7)
    other.run([5] * 350)
    other.put(save, slot=1)
    assert other.run([5] * 351).prefix_cache_tier is CacheTier.HOST, "what gave way was kept"
    other = make(n_ctx=400)
    other.scheduler.submit(make_job([5] * 150, max_tokens=50, slot=0))
    run_tick(other.scheduler, other.engine)
    with pytest.raises(SlotCommandRefused, match="no room for 303 tokens beside"):
        other.put(save, slot=1)
    run_to_end(other.scheduler, other.engine)
    with pytest.raises(SlotCommandRefused, match="does not fit into 200 cells"):
        make(n_ctx=200).put(save)


@pytest.mark.parametrize(("can_cut", "kv_unified"), KINDS)
def test_a_state_that_is_refused_leaves_nothing_behind(can_cut: bool, kv_unified: bool) -> None:
    one, other = (make(can_cut=can_cut, kv_unified=kv_unified) for _ in range(2))
    one.run(LONG)
    save = one.read()
    other.engine.sequences.fail_loads()
    restore = other.states.begin_restore(0, save.tokens, save.scope, save.parts)
    assert restore is not None
    with pytest.raises(SlotCommandRefused, match="refuses this state"):
        other.states.restorer.step(restore)
    other.states.restorer.cancel(restore)
    other.states.restorer.cancel(restore)
    other.scheduler.check_integrity()
    assert (other.scheduler.cache_snapshot().entries, other.engine.sequences.memory, other.content()) == (0, {}, 0)
    assert other.run(LONG).prefix_cache_tokens == 0


def test_a_worker_that_stops_takes_back_what_is_half_put() -> None:
    one, other = make(), make()
    one.run(LONG)
    save = one.read()
    restore = other.states.begin_restore(0, save.tokens, save.scope, save.parts)
    assert restore is not None
    other.states.restorer.step(restore)
    assert 0 < restore.n_restored < restore.n_tokens
    assert other.run(LONG).prefix_cache_tokens == 0, "half of a state is found by nobody"
    other.states.restorer.close()
    assert other.scheduler.cache_snapshot().entries == 1
    with pytest.raises(SlotCommandRefused, match="was evicted during"):
        other.states.restorer.step(restore)


def test_jobs_that_come_and_go_while_a_state_is_put_wait_for_it_at_most() -> None:
    one = make()
    one.run(LONG)
    save = one.read()
    other = make(n_ctx=420)
    late = make_job([5] * 390, max_tokens=4, slot=1)
    submitted: list[Job] = []

    def crowd() -> None:
        if not submitted:
            submitted.append(late)
            other.scheduler.submit(late)
        run_tick(other.scheduler, other.engine)

    other.put(save, between=crowd)
    [ended] = [output for output in run_to_end(other.scheduler, other.engine) if isinstance(output, JobEnded)]
    assert ended.job is late
    assert ended.error is None


def test_erasing_forgets_the_conversation_and_keeps_what_others_share() -> None:
    rig = make(host_bytes=10**7)
    rig.run(LONG)
    rig.run([*LONG[:200], *[3] * 50], slot=1)
    assert rig.states.erase(0) == 304
    rig.scheduler.check_integrity()
    assert rig.content(0) == 0
    assert rig.run(LONG).prefix_cache_tokens == 200
    assert rig.states.erase(0) == 304
    assert rig.states.erase(0) == 0


def test_erasing_forgets_host_memory_too() -> None:
    rig = make(host_bytes=10**7, n_ctx=400)
    rig.run(LONG, scope=Scope("a", 64))
    rig.run([5] * 350, slot=1)
    assert rig.scheduler.cache_snapshot().host_bytes > 0
    before = rig.tiers.match(pack(LONG), Scope("a", 64))
    assert before is not None
    assert before.n_tokens == 300
    assert rig.states.erase(0) == 304
    left = rig.tiers.match(pack(LONG), Scope("a", 64))
    assert left is not None
    assert left.n_tokens == 64, "what is public is everybody's"
    rig.tiers.check_integrity()
    with pytest.raises(SlotCommandRefused, match="no state"):
        rig.states.begin_save(0)


def test_erasing_a_recurrent_state_forgets_its_checkpoints() -> None:
    rig = make(can_cut=False, host_bytes=10**7)
    rig.run(LONG)
    assert rig.scheduler.cache_snapshot().entries >= 3
    rig.states.erase(0)
    assert rig.scheduler.cache_snapshot().entries == 0
    rig.scheduler.check_integrity()
    assert rig.run(LONG).prefix_cache_tokens == 0


def test_a_slot_that_runs_is_neither_erased_nor_restored_and_others_are_unknown() -> None:
    rig = make()
    rig.run(LONG)
    save = rig.read()
    job = make_job([5] * 20, max_tokens=9, slot=0)
    rig.scheduler.submit(job)
    run_tick(rig.scheduler, rig.engine)
    with pytest.raises(SlotCommandRefused, match=f"slot 0 is running job {job.id}"):
        rig.states.erase(0)
    with pytest.raises(SlotCommandRefused, match="slot 0 is running"):
        rig.states.begin_restore(0, save.tokens, save.scope, save.parts)
    for call in (rig.states.erase, rig.states.begin_save):
        with pytest.raises(SlotCommandRefused, match="no slot 2: the worker has 2"):
            call(2)
    run_to_end(rig.scheduler, rig.engine)


def test_parts_come_back_as_they_were_and_nonsense_is_an_error() -> None:
    parts = [StatePart(0, 64, b"one"), StatePart(0, 80, b""), StatePart(80, 90, b"three")]
    data = join_parts(parts)
    assert [(part.first, part.end, bytes(part.data)) for part in split_parts(data, 90)] == [
        (part.first, part.end, bytes(part.data)) for part in parts
    ]
    for bad, n_tokens in ((data, 91), (data[:-1], 90), (data[:30], 90), (data + b"x", 90), (b"", 1)):
        with pytest.raises(ValueError, match="part"):
            split_parts(bad, n_tokens)
    with pytest.raises(ValueError, match="continue"):
        split_parts(join_parts([parts[0], parts[2]]), 90)
    assert TOKEN_BYTES == 4
