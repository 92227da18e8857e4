"""Workers that compute at the same time share the CPU cores of their host."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from tests.support.redis_servers import wait_until

from llamaq.worker.engine.llama_bindings import Context
from llamaq.worker.plugins import load_strategy
from llamaq.worker.process import core_sharing
from llamaq.worker.process.core_sharing import IDLE_CHECKS, Announcement, CoreSharing, share_cores
from llamaq.worker.process.embedding_parts import EmbeddingParts
from llamaq.worker.process.generation_parts import GenerationParts
from llamaq.worker.settings import WorkerSettings, load_settings

CPUS = range(8)
ANNOUNCE_AND_WAIT = """
import sys
from llamaq.worker.process import core_sharing
from llamaq.worker.process.core_sharing import Announcement
announcement = Announcement([0], sys.argv[1])
announcement.set_computing(True)
print("announced", flush=True)
sys.stdin.read()
"""


class EngineThread:
    """Runs each call at once."""

    def __init__(self) -> None:
        self.is_idle = True
        self.n_ticks = 0
        self.has_woken = threading.Event()

    def call(self, work: Callable[[], None]) -> None:
        work()


class SharingWorker:
    """A worker with eight cores."""

    def __init__(self, prefix: str) -> None:
        self.engine_thread = EngineThread()
        self.announcement = Announcement(CPUS, prefix)
        self.n_threads: list[int] = []
        self.n_free_cpus = 8.0
        self.sharing = CoreSharing(
            self.announcement,
            self.engine_thread,
            self.n_threads.append,
            count_ticks=lambda: self.engine_thread.n_ticks,
            n_cores=8,
            n_free_cpus=lambda: self.n_free_cpus,
        )


@pytest.fixture
def prefix() -> str:
    """The start of names that no worker of another test uses."""
    return f"llamaq.test/{secrets.token_hex(8)}/"


def test_a_worker_takes_its_share_while_others_compute(prefix: str) -> None:
    worker = SharingWorker(prefix)
    others = [Announcement(CPUS, prefix) for _ in range(2)]
    worker.sharing.check()
    assert worker.n_threads == []
    for other, n_threads in zip(others, (4, 2), strict=True):
        other.set_computing(True)
        worker.sharing.check()
        assert worker.n_threads[-1] == worker.sharing.n_threads == n_threads
    for other in others:
        other.set_computing(False)
    worker.sharing.check()
    assert worker.n_threads == [4, 2, 8]


def test_a_worker_keeps_one_thread_among_many(prefix: str) -> None:
    worker = SharingWorker(prefix)
    others = [Announcement(CPUS, prefix) for _ in range(20)]
    for other in others:
        other.set_computing(True)
    worker.sharing.check()
    assert worker.n_threads == [1]
    for other in others:
        other.set_computing(False)


def test_a_worker_leaves_busy_cpus_to_other_programs(prefix: str) -> None:
    worker = SharingWorker(prefix)
    found = []
    for n_free in (7.6, 7.4, 7.6, 7.8, 2.5, 2.4, 2.7, 3.2, 0.1, 0.0, 16.0):
        worker.n_free_cpus = n_free
        worker.sharing.check()
        found.append(worker.sharing.n_threads)
    assert found == [8, 7, 7, 8, 3, 2, 2, 3, 1, 1, 8]
    assert worker.n_threads == [7, 8, 3, 2, 3, 1, 8]


def test_the_time_of_other_workers_is_not_that_of_other_programs(prefix: str) -> None:
    worker, other = SharingWorker(prefix), Announcement(CPUS, prefix)
    other.set_computing(True)
    worker.n_free_cpus = 1.0
    worker.sharing.check()
    assert worker.n_threads == [4]
    other.set_computing(False)


def test_a_worker_computes_during_a_long_tick_and_after_short_ones(prefix: str) -> None:
    worker, observer = SharingWorker(prefix), Announcement(CPUS, prefix)
    worker.sharing.check()
    assert observer.n_others() == 0
    worker.engine_thread.is_idle = False  # woken up for a moment, or in the first tick, which is not counted yet
    worker.sharing.check()
    assert observer.n_others() == 0
    worker.sharing.check()
    assert observer.n_others() == 1
    worker.engine_thread.is_idle = True
    worker.engine_thread.n_ticks = 5
    for _ in range(IDLE_CHECKS):
        worker.sharing.check()
        assert observer.n_others() == 1
    worker.sharing.check()
    assert observer.n_others() == 0


def test_workers_on_other_cpus_do_not_count(prefix: str) -> None:
    low, high, both = Announcement([0, 1], prefix), Announcement([2, 3], prefix), Announcement(range(4), prefix)
    low.set_computing(True)
    assert [each.n_others() for each in (low, high, both)] == [0, 0, 1]
    high.set_computing(True)
    assert [each.n_others() for each in (low, high, both)] == [0, 0, 2]
    low.set_computing(False)
    assert both.n_others() == 1
    high.set_computing(False)


def test_a_name_that_cannot_be_published_is_tried_again(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def bind(self, _: object) -> None:
            raise OSError(24, "Too many open files")

    worker, observer = SharingWorker(prefix), Announcement(CPUS, prefix)
    worker.engine_thread.n_ticks = 1
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", Refusing)
        with pytest.raises(OSError, match="Too many open files"):
            worker.sharing.check()
    assert worker.announcement.n_others() == 0
    worker.engine_thread.n_ticks = 2
    worker.sharing.check()
    assert (worker.announcement.n_others(), observer.n_others()) == (0, 1)
    worker.announcement.set_computing(False)


def test_the_thread_announces_and_withdraws(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_sharing, "CHECK_EVERY_S", 0.001)
    monkeypatch.setattr(core_sharing, "IDLE_CHECK_EVERY_S", 3600.0)
    worker, observer = SharingWorker(prefix), Announcement(CPUS, prefix)
    with worker.sharing:
        for _ in range(2):
            worker.engine_thread.is_idle = False
            worker.engine_thread.has_woken.set()
            wait_until(lambda: observer.n_others() == 1, "the announcement")
            worker.engine_thread.is_idle = True
            wait_until(lambda: observer.n_others() == 0, "its end, after some checks without work")


def test_a_job_that_ended_before_the_thread_looked_is_announced(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_sharing, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(core_sharing, "IDLE_CHECK_EVERY_S", 3600.0)
    monkeypatch.setattr(core_sharing, "IDLE_CHECKS", 10_000)  # the announcement lasts until it is seen
    worker, observer = SharingWorker(prefix), Announcement(CPUS, prefix)
    with worker.sharing:
        worker.engine_thread.n_ticks += 1
        worker.engine_thread.has_woken.set()
        wait_until(lambda: observer.n_others() == 1, "the announcement")


class CountingAnnouncement(Announcement):
    """Counts its looks for other workers."""

    n_looks = 0

    def n_others(self) -> int:
        self.n_looks += 1
        return super().n_others()


def count_in_idle_worker(
    prefix: str, monkeypatch: pytest.MonkeyPatch, has_ended: Callable[[EngineThread, int, int], bool]
) -> tuple[int, int]:
    """Run an idle worker whose waits are short, until `has_ended` of its engine thread, and of both counts.

    Returns:
        How often it has woken up, and how often it has looked for other workers.
    """
    wakes: list[None] = []

    def count_ticks() -> int:
        wakes.append(None)  # called at least once in each wake-up
        return 0

    monkeypatch.setattr(core_sharing, "CHECK_EVERY_S", 0.001)
    monkeypatch.setattr(core_sharing, "IDLE_CHECK_EVERY_S", 0.05)
    engine_thread, announcement = EngineThread(), CountingAnnouncement(CPUS, prefix)
    with CoreSharing(
        announcement, engine_thread, lambda _: None, count_ticks=count_ticks, n_cores=8, n_free_cpus=lambda: 8
    ):
        wait_until(lambda: has_ended(engine_thread, len(wakes), announcement.n_looks), "some looks")
        return len(wakes), announcement.n_looks


def test_an_idle_worker_wakes_up_only_to_look_for_others(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_wakes, n_looks = count_in_idle_worker(prefix, monkeypatch, lambda _, __, n_looks: n_looks >= 10)
    assert n_looks >= 10
    assert n_wakes <= 4 * (n_looks + 1), "at most one wake-up beside each look, and each asks for the ticks twice"


def test_an_idle_worker_that_gets_other_commands_than_jobs_still_looks_for_others(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_commands(engine_thread: EngineThread, _: int, n_looks: int) -> bool:
        engine_thread.has_woken.set()
        return n_looks >= 10

    assert count_in_idle_worker(prefix, monkeypatch, send_commands)[1] >= 10


def test_an_idle_worker_ends_without_a_wait(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class HasWoken(threading.Event):
        n_waits = 0

        def wait(self, timeout: float | None = None) -> bool:
            self.n_waits += 1
            return super().wait(timeout)

    monkeypatch.setattr(core_sharing, "CHECK_EVERY_S", 0.001)
    monkeypatch.setattr(core_sharing, "IDLE_CHECK_EVERY_S", 3600.0)
    worker = SharingWorker(prefix)
    worker.engine_thread.has_woken = has_woken = HasWoken()
    with worker.sharing:
        wait_until(lambda: has_woken.n_waits > 0, "the wait of an idle worker")


@pytest.mark.starts_processes
def test_the_announcement_of_a_worker_ends_with_its_process(prefix: str) -> None:
    observer = Announcement(CPUS, prefix)
    arguments = [sys.executable, "-c", ANNOUNCE_AND_WAIT, prefix]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"announced\n"
        assert observer.n_others() == 1
        process.kill()
        process.wait()
        assert observer.n_others() == 0


def test_the_end_of_the_context_withdraws_the_announcement(prefix: str) -> None:
    worker, observer = SharingWorker(prefix), Announcement(CPUS, prefix)
    with worker.sharing:
        worker.announcement.set_computing(True)
    assert observer.n_others() == 0


def test_a_number_of_threads_in_the_settings_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaq.worker.thread_settings.usable_cores", lambda _: 4)

    def share(n_threads: int | None) -> object:
        return share_cores(WorkerSettings(n_threads=n_threads), EngineThread(), lambda _: None, lambda: 0)

    assert isinstance(share(4), nullcontext)
    assert isinstance(share(None), CoreSharing)
    monkeypatch.setattr("llamaq.worker.thread_settings.usable_cores", lambda _: 1)
    assert isinstance(share(None), nullcontext)


def threads_of(context: Context) -> tuple[int, int]:
    pointer = context.pointer
    return llama_cpp.llama_n_threads(pointer), llama_cpp.llama_n_threads_batch(pointer)


@pytest.mark.parametrize(
    ("values", "threads", "threads_of_drafts"),
    [
        ({}, (3, 3), (3, 3)),
        ({"n_threads_batch": 2}, (3, 2), (3, 2)),
        ({"n_threads_draft": 1}, (3, 3), (1, 1)),
    ],
)
def test_the_threads_of_the_contexts_change_where_the_settings_leave_them_open(
    demo_model: Path, values: dict[str, Any], threads: tuple[int, int], threads_of_drafts: tuple[int, int]
) -> None:
    values = values | {
        "model": str(demo_model),
        "model_draft": str(demo_model),
        "speculation": "model",
        "warmup": False,
    }
    settings = load_settings(n_ctx=256, n_batch=64, **values)
    parts = GenerationParts(demo_model, settings, load_strategy("balanced", 0.0), "worker")
    parts.set_n_threads(3)
    assert threads_of(parts.engine.context) == threads
    assert parts.drafter is not None
    assert threads_of(parts.drafter.context) == threads_of_drafts
    parts.close()
    parts.free_model()


@pytest.mark.parametrize(("n_threads_batch", "expected"), [(None, (3, 3)), (2, (3, 2))])
def test_the_threads_of_a_worker_for_embeddings_change_too(
    bert_model: Path, n_threads_batch: int | None, expected: tuple[int, int]
) -> None:
    settings = load_settings(
        model=str(bert_model), embeddings=True, n_ctx=64, warmup=False, n_threads_batch=n_threads_batch
    )
    parts = EmbeddingParts(bert_model, settings, "worker")
    parts.set_n_threads(3)
    assert threads_of(parts.engine.context) == expected
    parts.free_model()
