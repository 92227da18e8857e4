"""The tick loop runs commands and ticks in order, and publishes each tick while the next one computes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from tests.support.tick_loop_rig import (
    HANG_S,
    N_SLOTS,
    POLL_S,
    WAIT_S,
    Loop,
    RecordingMailbox,
    SlowEngine,
)

from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.queue_and_worker_state import TickStats
from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.draft import Drafting
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken, SlotAcquired
from llamaq.worker.engine_loop.engine_liveness import SLOW_TICKS
from llamaq.worker.engine_loop.output_mailbox import JobWithdrawn, Message
from llamaq.worker.scheduling.surplus_jobs import SURPLUS_AFTER_S
from llamaq.worker.testing.fake_job import make_job

pytestmark = pytest.mark.interpreted  # the recording classes inherit from compiled ones


def admit_all(loop: Loop, jobs: Sequence[Job]) -> None:
    for job in jobs:
        loop.ticks.admit([job])


def test_the_measurements_of_a_tick_are_recorded_before_its_outputs_are_put_into_the_mailbox() -> None:
    loop = Loop()
    loop.start(make_job(max_tokens=3))
    loop.run_until_empty()
    kinds = [type(effect).__name__ for effect in loop.effects]
    first = ["TickStats", "SlotAcquired", "NewToken"]
    assert kinds == [*first, "TickStats", "NewToken", "TickStats", "NewToken", "JobEnded"]
    assert loop.shared.telemetry.n_ticks == 3
    assert repr(loop.ticks) == "<TickLoop ticks=3 <Scheduler 0/2 slots, 0 waiting>>"


class PublicationsMailbox(RecordingMailbox):
    """Adds the number of new tokens of each publication to the effects, and the other messages."""

    def put(self, messages: Sequence[Message]) -> None:
        if messages:
            self._effects.append(sum(isinstance(one, NewToken) for one in messages))
        self._effects += [one for one in messages if not isinstance(one, NewToken)]


def publications(
    stream_interval_s: float, batch_s: float, jobs: Sequence[Job], draft_s: float | None = None
) -> list[object]:
    """Return how many tokens are published together, and the names of the other messages."""
    loop = Loop(mailbox=PublicationsMailbox, stream_interval_s=stream_interval_s, draft_s=draft_s)
    loop.engine.batch_s = batch_s
    for job in jobs:
        loop.start(job)
    loop.run_until_empty()
    effects = [effect for effect in loop.effects if not isinstance(effect, TickStats)]
    return [effect if isinstance(effect, int) else type(effect).__name__ for effect in effects]


def test_tokens_of_short_ticks_are_published_together_and_first_tokens_and_ends_at_once() -> None:
    together = publications(0.0045, 0.001, [make_job(max_tokens=10)])
    assert together == [1, "SlotAcquired", 4, 4, 1, "JobEnded"]


def test_the_first_token_after_a_long_prompt_is_published_at_once() -> None:
    long_prompt = make_job("x" * 40, max_tokens=4)  # its slot was published with an earlier chunk
    assert publications(1.0, 0.001, [long_prompt])[-3:] == [1, 3, "JobEnded"]


def test_the_tokens_of_a_tick_that_takes_longer_than_the_interval_are_published_at_once() -> None:
    at_once = publications(0.0045, 0.005, [make_job(max_tokens=4)])
    assert at_once == [1, "SlotAcquired", 1, 1, 1, "JobEnded"]
    assert publications(0.0, 0.001, [make_job(max_tokens=4)]) == at_once


def drafting_job(max_tokens: int) -> Job:
    """Return a job for which the draft model drafts."""
    return make_job(max_tokens=max_tokens, drafting=Drafting(None, 4))


def test_the_time_of_the_draft_model_counts_as_time_of_the_tick() -> None:
    at_once = publications(0.005, 0.001, [drafting_job(max_tokens=4)], draft_s=0.0025)
    assert at_once == [1, "SlotAcquired", 1, 1, 1, "JobEnded"]
    together = publications(0.005, 0.001, [drafting_job(max_tokens=4)], draft_s=0.0001)
    assert together == [1, "SlotAcquired", 3, "JobEnded"]


def test_tokens_do_not_wait_for_a_tick_with_a_prompt() -> None:
    long_prompt = make_job("x" * 40, max_tokens=1)
    in_turns = publications(1.0, 0.001, [make_job("x", max_tokens=20), long_prompt])  # chunks of 16 tokens
    assert in_turns[:3] == [1, "SlotAcquired", "SlotAcquired"]
    assert in_turns[3:5] == [1, 2], "while the prompt is computed, each tick is published"


def test_the_outputs_of_a_tick_are_published_while_the_next_batch_is_computed() -> None:
    published = threading.Event()
    is_computing = threading.Event()

    class Mailbox(RecordingMailbox):
        def put(self, messages: Sequence[Message]) -> None:
            assert is_computing.wait(WAIT_S)  # the engine thread would wait here for ever
            super().put(messages)
            published.set()

    class Engine(SlowEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            if self.batches:
                is_computing.set()
                assert published.wait(WAIT_S)
            return super().run(batch)

    loop = Loop(engine=Engine, mailbox=Mailbox)
    loop.start(make_job(max_tokens=3))
    loop.run_until_empty()
    assert len(loop.engine.batches) == 3
    assert isinstance(loop.effects[-1], JobEnded)


def test_a_job_that_is_cancelled_while_a_batch_is_computed_publishes_the_token_of_the_batch_and_ends() -> None:
    class Engine(SlowEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            if len(self.batches) == 1:
                loop.ticks.cancel(job.id)
            return super().run(batch)

    loop, job = Loop(engine=Engine), make_job(max_tokens=9)
    loop.start(job)
    loop.run_until_empty()
    messages = [effect for effect in loop.effects if not isinstance(effect, TickStats)]
    assert [type(message).__name__ for message in messages] == ["SlotAcquired", "NewToken", "NewToken", "JobEnded"]
    assert isinstance(messages[-1], JobEnded)
    assert messages[-1].reason is FinishReason.CANCELLED
    assert len(loop.engine.batches) == 2
    assert loop.engine.sequences.memory == {}


@pytest.mark.parametrize(("batch_s", "is_early"), [(0.1, True), (0.001, False)])
def test_the_slot_of_a_job_is_published_before_its_first_tick_if_this_tick_is_long(
    batch_s: float, is_early: bool
) -> None:
    first, second = make_job("x" * 10, max_tokens=9), make_job("y" * 10, max_tokens=9)

    class Engine(SlowEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            if len(self.batches) == 1:
                loop.ticks.admit([second])
            if len(self.batches) == 2:
                loop.ticks.stop(HANG_S)
            return super().run(batch)

    loop = Loop(engine=Engine)
    loop.engine.batch_s = batch_s
    loop.start(first)
    loop.ticks.run()
    kinds = [
        type(one).__name__ for one in loop.effects if isinstance(one, TickStats) or getattr(one, "job", None) is second
    ]
    place = kinds.index("SlotAcquired")
    assert kinds[place + 1] == ("TickStats" if is_early else "NewToken")


def test_a_preempted_job_is_withdrawn_after_its_tokens_and_the_loss_of_its_slot_are_published() -> None:
    bulk = [make_job(max_tokens=9, priority=Priority.BULK) for _ in range(N_SLOTS)]
    urgent = make_job(max_tokens=1)

    class Engine(SlowEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            if len(self.batches) == 1:
                loop.ticks.admit([urgent])
            if len(self.batches) == 2:
                loop.ticks.stop(HANG_S)
            return super().run(batch)

    loop = Loop(engine=Engine, capacity=N_SLOTS)
    for job in bulk:
        loop.start(job)
    loop.ticks.run()
    loop.scheduler.check_integrity()
    of_last = [type(effect).__name__ for effect in loop.effects if getattr(effect, "job", None) is bulk[-1]]
    assert of_last == ["SlotAcquired", "NewToken", "NewToken", "SlotLost", "JobWithdrawn"]
    assert JobEnded in {type(effect) for effect in loop.effects if getattr(effect, "job", None) is urgent}


def test_the_loop_ends_with_the_error_of_the_publishing_thread() -> None:
    class Mailbox(RecordingMailbox):
        def put(self, messages: Sequence[Message]) -> None:
            raise OSError("expected")

    loop = Loop(mailbox=Mailbox)
    loop.start(make_job(max_tokens=1000))
    with pytest.raises(OSError, match="expected"):
        loop.run_until_empty()


def test_an_error_of_the_engine_ends_the_loop_after_the_earlier_outputs_are_published() -> None:
    class Engine(SlowEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            if len(self.batches) == 2:
                raise OSError("expected")
            return super().run(batch)

    loop = Loop(engine=Engine)
    loop.start(make_job(max_tokens=9))
    with pytest.raises(OSError, match="expected"):
        loop.run_until_empty()
    assert sum(isinstance(effect, NewToken) for effect in loop.effects) == 2


async def test_the_last_outputs_of_an_engine_that_becomes_idle_are_published_at_once() -> None:
    loop = Loop()
    with loop.running():
        loop.ticks.admit([make_job(max_tokens=1)])
        async with asyncio.timeout(WAIT_S):
            while not any(isinstance(effect, JobEnded) for effect in loop.effects):  # noqa: ASYNC110 - as above
                await asyncio.sleep(POLL_S)


async def test_jobs_that_are_admitted_together_begin_in_the_same_tick() -> None:
    loop = Loop()
    with loop.running():
        loop.ticks.admit([make_job(max_tokens=2), make_job(max_tokens=2)])
        async with asyncio.timeout(WAIT_S):
            while sum(isinstance(effect, JobEnded) for effect in loop.effects) < 2:  # noqa: ASYNC110 - as above
                await asyncio.sleep(POLL_S)
    assert [stats.active_slots for stats in loop.effects if isinstance(stats, TickStats)] == [2, 2]


async def test_an_idle_engine_saves_cells_ahead_until_a_command_arrives() -> None:
    loop = Loop()
    n_left, n_left_at_command = 1000, None

    def save_ahead() -> bool:
        nonlocal n_left
        n_left -= 1
        if n_left == 500:
            loop.ticks.commands.call(note_command)
        return n_left > 0

    def note_command() -> None:
        nonlocal n_left_at_command
        n_left_at_command = n_left

    loop.scheduler.save_ahead = save_ahead  # type: ignore[method-assign]
    with loop.running():
        async with asyncio.timeout(WAIT_S):
            while n_left > 0:  # noqa: ASYNC110 - the engine thread has no event for it
                await asyncio.sleep(POLL_S)
    assert n_left_at_command == 500


def test_the_queue_depth_of_the_gauge_is_in_the_measurements() -> None:
    loop = Loop()
    loop.shared.queue_depth.n_waiting = 7
    loop.start(make_job(max_tokens=1))
    loop.run_until_empty()
    stats = loop.shared.telemetry.last_tick
    assert stats is not None
    assert stats.queue_depth == 7


def test_a_stopping_worker_withdraws_jobs_without_a_slot_before_it_computes() -> None:
    loop = Loop()
    jobs = [make_job(max_tokens=1) for _ in range(N_SLOTS + 2)]
    for job in jobs:
        loop.scheduler.submit(job)
    loop.run_until_empty()
    assert loop.effects == [JobWithdrawn(job) for job in jobs]


async def test_bulk_jobs_beyond_the_capacity_are_withdrawn() -> None:
    loop = Loop(capacity=N_SLOTS + 1)
    jobs = [make_job(max_tokens=500, priority=Priority.BULK) for _ in range(N_SLOTS + 3)]
    with loop.running():

        def pass_time() -> None:
            loop.clock.now_s += SURPLUS_AFTER_S

        def admit_jobs_and_pass_time() -> None:
            admit_all(loop, jobs)
            loop.ticks.commands.call(pass_time)  # runs after the jobs are admitted, and before a job has ended

        await asyncio.wrap_future(loop.ticks.commands.call(admit_jobs_and_pass_time))
        while sum(isinstance(effect, JobWithdrawn) for effect in loop.effects) < 2:  # noqa: ASYNC110 - the engine thread has no event for a tick
            await asyncio.sleep(POLL_S)
    withdrawn = [effect for effect in loop.effects if isinstance(effect, JobWithdrawn)]
    assert withdrawn == [JobWithdrawn(jobs[-1]), JobWithdrawn(jobs[-2])]


async def test_a_call_returns_the_result_or_the_error_of_its_work() -> None:
    loop = Loop()

    def fail() -> None:
        raise ValueError("expected")

    with loop.running():
        thread = await asyncio.wrap_future(loop.ticks.commands.call(threading.current_thread))
        assert thread is not threading.current_thread()
        with pytest.raises(ValueError, match="expected"):
            await asyncio.wrap_future(loop.ticks.commands.call(fail))
        assert await asyncio.wrap_future(loop.ticks.commands.call(lambda: 5)) == 5


def test_a_cancelled_job_ends_before_the_next_tick() -> None:
    loop = Loop()
    job = make_job(max_tokens=3)
    loop.start(job)
    loop.ticks.cancel(job.id)
    loop.run_until_empty()
    [acquired, ended] = loop.effects
    assert acquired == SlotAcquired(job)
    assert isinstance(ended, JobEnded)
    assert (ended.job, ended.reason) == (job, FinishReason.CANCELLED)


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_released_attempt_ends_without_an_output_and_another_attempt_stays(attempt: int) -> None:
    loop = Loop()
    old = make_job(max_tokens=1, attempt=1)
    new = make_job(max_tokens=1, attempt=attempt, job_id=old.id)
    loop.start(old)
    loop.ticks.release(old.lease)
    loop.ticks.admit([new])
    loop.ticks.release(old.lease)
    loop.run_until_empty()
    assert loop.effects == [JobWithdrawn(new), SlotAcquired(old)]


def test_a_tick_hangs_when_it_takes_longer_than_the_limit() -> None:
    loop = Loop()
    loop.clock.now_s += HANG_S - 1
    assert loop.ticks.liveness.is_alive
    loop.clock.now_s += 2
    assert loop.ticks.liveness.tick_age_s == HANG_S + 1
    assert not loop.ticks.liveness.is_alive


def test_slow_ticks_raise_the_limit_of_a_hang() -> None:
    loop = Loop()
    loop.engine.batch_s = HANG_S / 2
    loop.start(make_job(max_tokens=1))
    loop.run_until_empty()
    assert loop.ticks.liveness.hang_after_s == SLOW_TICKS * HANG_S / 2


def test_the_loop_ends_after_the_grace_time_although_jobs_are_left() -> None:
    loop = Loop()
    loop.start(make_job(max_tokens=1000))
    loop.ticks.stop(10)
    loop.ticks.stop(0)
    loop.ticks.stop(10)
    loop.ticks.run()
    assert loop.effects == []
    assert loop.scheduler.has_work


async def test_the_engine_is_idle_while_it_has_no_work() -> None:
    in_ticks: list[bool] = []

    class Engine(SlowEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            in_ticks.append(loop.ticks.commands.is_idle)
            return super().run(batch)

    loop = Loop(engine=Engine)
    loop.start(make_job(max_tokens=2))
    with loop.running():
        async with asyncio.timeout(WAIT_S):
            while not loop.ticks.commands.is_idle:  # noqa: ASYNC110 - as above
                await asyncio.sleep(POLL_S)
    assert in_ticks == [False, False]


async def test_a_command_wakes_the_idle_engine_and_those_who_wait_for_it() -> None:
    loop = Loop()
    commands = loop.ticks.commands
    with loop.running():
        async with asyncio.timeout(WAIT_S):
            while not commands.is_idle:  # noqa: ASYNC110 - as above
                await asyncio.sleep(POLL_S)
            assert not commands.has_woken.is_set()
            commands.call(lambda: None)
            assert await asyncio.to_thread(commands.has_woken.wait, WAIT_S)


async def test_a_snapshot_is_taken_when_the_engine_becomes_idle() -> None:
    loop = Loop()
    first = loop.ticks.snapshot
    loop.start(make_job(max_tokens=2))
    with loop.running():
        async with asyncio.timeout(WAIT_S):
            while loop.ticks.snapshot is first:  # noqa: ASYNC110 - as above
                await asyncio.sleep(POLL_S)
    assert not loop.scheduler.has_work
    assert [slot.state for slot in loop.ticks.snapshot.slots] == ["idle"] * N_SLOTS


def test_a_stopped_loop_without_jobs_runs_the_commands_that_wait() -> None:
    loop = Loop()
    answer = loop.ticks.commands.call(lambda: 7)
    loop.run_until_empty()
    assert answer.done()
    assert answer.result() == 7
