"""The I/O thread of a worker, with a preparer that rejects all jobs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import redis
from tests.support.loop_clock import advance_loop_clock
from tests.support.ports import HOST
from tests.support.redis_servers import wait_until
from tests.support.tick_loop_rig import idle_tick_loop
from tests.support.worker_cards import make_card

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import Keys
from llamaq.producer import Client, JobFailed
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.broker.queue_membership import QueueMembership
from llamaq.worker.broker.stats_writer import StatsWriter
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.process import queue_session
from llamaq.worker.process.broker_factory import BrokerFactory
from llamaq.worker.process.io_thread import IoThread
from llamaq.worker.settings import load_settings

SOON_S = 20.0


class RejectingPreparer:
    """Rejects each job."""

    def is_quick(self, _: bytes) -> bool:
        return True

    def prepare(self, *_: object) -> Any:
        raise JobRejected(ErrorCode.INVALID_REQUEST, "rejected")


def io_thread_of(url: str, queue: str) -> IoThread:
    """Return the I/O thread of a worker that has the name of its queue."""
    settings = load_settings(redis_url=url, queue=queue)
    shared, preparer, commands = SharedState(), cast(Any, RejectingPreparer()), cast(Any, None)
    ticks, card = idle_tick_loop(shared), make_card(queue, queue)
    broker = BrokerFactory(settings, card, b"vocabulary", preparer, ticks, shared, commands, commands)
    return IoThread(settings, card.worker, broker, ticks, shared)


@contextmanager
def served(url: str, queue: str) -> Iterator[IoThread]:
    """Serve a queue until the end of the block."""
    io_thread = io_thread_of(url, queue)
    assert io_thread.start() is None
    try:
        yield io_thread
    finally:
        io_thread.close()


def test_a_worker_that_is_stopped_before_its_thread_runs_does_not_wait_for_redis(free_port: int) -> None:
    io_thread = io_thread_of(f"redis://{HOST}:{free_port}/0", "queue")
    io_thread.stop_intake()
    starting = threading.Thread(target=io_thread.start, daemon=True)
    starting.start()
    starting.join(SOON_S)
    has_ended = not starting.is_alive()
    io_thread.close()
    assert has_ended
    assert io_thread.error is None


def test_a_worker_waits_beside_a_job_stream_of_another_type_and_names_its_key(
    redis_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Keys().jobs(queue, 0, Priority.INTERACTIVE)
    io_thread = io_thread_of(redis_url, queue)
    with redis.Redis.from_url(redis_url) as server:
        server.set(stream, "of another program")
        starting = threading.Thread(target=io_thread.start, daemon=True)
        starting.start()
        wait_until(lambda: f"{stream} is not a stream" in caplog.text or not starting.is_alive(), "the warning")
        assert starting.is_alive()
        server.delete(stream)
        starting.join(SOON_S)
        assert server.xinfo_groups(stream)
    io_thread.close()
    assert io_thread.error is None


def test_a_defect_in_a_callback_ends_the_thread_because_its_jobs_would_wait_forever(
    redis_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    io_thread = io_thread_of(redis_url, queue)
    assert io_thread.start() is None
    io_thread._session._shared.outputs.put([cast(Any, "no message")])
    wait_until(lambda: io_thread.error is not None, "the end of the thread", SOON_S)
    io_thread.close()
    assert "io_thread.crashed" in caplog.text


def test_the_stats_of_a_job_that_ends_before_the_close_are_stored(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_forever(_: StatsWriter) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(StatsWriter, "run", wait_forever)
    with Client(redis_url, queue) as client:
        with served(redis_url, queue), pytest.raises(JobFailed) as failed:
            client.generate("hello")
        assert [job.job_id for job in client.stats().recent] == [failed.value.job_id]


def test_a_worker_whose_stats_redis_refuses_logs_that_and_is_not_listed_after_its_end(
    redis_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(redis_url, queue) as client, redis.Redis.from_url(redis_url) as server:
        with served(redis_url, queue):
            assert [worker.card.worker for worker in client.workers()] == [queue]
            server.set(Keys().stats(queue), "overwritten by another client")
            with pytest.raises(JobFailed):
                client.generate("hello")
            wait_until(lambda: "stats.redis_error" in caplog.text, "the outage in the log", SOON_S)
        assert client.workers() == ()
        assert not server.exists(Keys().worker(queue))


def test_a_step_of_the_close_that_does_not_end_is_logged_and_leaves_time_for_the_next_ones(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits_s = [71.0, 10.0]
    """The time of each step that does not end. The remaining steps have 9 and 10 seconds more."""

    async def wait_forever(*_: Outbox | QueueMembership, crashed: bool = False) -> None:
        advance_loop_clock(monkeypatch, limits_s.pop(0))
        await asyncio.Event().wait()

    monkeypatch.setattr(queue_session, "LEAVE_TIMEOUT_S", 100.0)
    with Client(redis_url, queue) as client:
        with served(redis_url, queue):
            monkeypatch.setattr(Outbox, "close", wait_forever)
            monkeypatch.setattr(QueueMembership, "leave", wait_forever)
        assert client.workers() == ()
    failed = [record.getMessage() for record in caplog.records if "close_failed" in record.getMessage()]
    assert [message.split()[1] for message in failed] == ["step=write_events", "step=leave_queue"]
