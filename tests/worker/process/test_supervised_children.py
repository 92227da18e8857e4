"""Supervised children that die early or hang. Their programs are shell scripts, which run no worker."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.support.redis_servers import wait_until

from llamaq.worker.process import supervised_child
from llamaq.worker.process import supervisor as supervisor_module
from llamaq.worker.process.stop_times import LEAVE_TIMEOUT_S, SAVE_TIMEOUT_S
from llamaq.worker.process.supervised_child import SupervisedChild
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings

pytestmark = pytest.mark.starts_processes
DIES = "exit 1"
HANGS = "trap '' TERM INT; echo ready >&2; exec sleep 600"
DIES_AT_THE_SECOND_SIGNAL = "trap '' TERM; trap 'exit 1' INT; echo ready >&2; while :; do sleep 0.02; done"
KILL_AFTER_S = 0.5
LONG_S = 60.0
"""Longer than a busy machine delays a child or a thread."""
Release = Callable[[], object]
SetProgram = Callable[[str], None]


@pytest.fixture
def set_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SetProgram:
    """Returns a function that sets the script which the next children run."""

    def set_script(script: str) -> None:
        path = tmp_path / f"program-{len(list(tmp_path.iterdir()))}"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return set_script


def set_release(monkeypatch: pytest.MonkeyPatch, release: Release) -> None:
    """Replace the release of the jobs of a dead worker, which connects to Redis."""

    def start(*_: object) -> threading.Thread:
        thread = threading.Thread(target=release)
        thread.start()
        return thread

    monkeypatch.setattr(supervised_child, "release_in_background", start)


def test_a_child_that_dies_before_it_reads_its_settings_is_started_again(
    set_program: SetProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = subprocess.Popen, []

    def start_and_wait(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*args, **options)
        process.wait()
        started.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", start_and_wait)
    set_release(monkeypatch, lambda: None)
    set_program(DIES)
    child = SupervisedChild(WorkerSettings(), None)
    child.start()
    wait_until(lambda: child.check() is None and len(started) == 3, "the child is started again")
    child.check_end()


def test_a_child_has_the_automatic_configuration_of_opentelemetry(
    set_program: SetProgram, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def path_of_child() -> str:
        log.seek(0)
        log.truncate()
        child = SupervisedChild(WorkerSettings(), log)
        child.start()
        wait_until(lambda: not child.is_running, "the child has ended")
        child.check_end()
        return (tmp_path / "log").read_text().strip()

    set_release(monkeypatch, lambda: None)
    set_program('echo "$PYTHONPATH" >&2')
    monkeypatch.setenv("PYTHONPATH", "/own")
    with (tmp_path / "log").open("w+b") as log:
        assert path_of_child() == "/own"
        module = ModuleType("opentelemetry.instrumentation.auto_instrumentation")
        module.__file__ = "/site/auto/__init__.py"
        monkeypatch.setitem(sys.modules, module.__name__, module)
        assert path_of_child() == "/site/auto:/own"
        monkeypatch.delenv("PYTHONPATH")
        assert path_of_child() == "/site/auto"


def test_a_supervisor_waits_until_its_children_have_left_their_queue_and_saved_their_prefix_caches() -> None:
    """A shorter wait would end a normal stop with exit code 1."""
    assert Supervisor.REQUEUE_S >= LEAVE_TIMEOUT_S + SAVE_TIMEOUT_S


@contextmanager
def supervising(tmp_path: Path, set_program: SetProgram, *scripts: str) -> Iterator[Supervisor]:
    """Supervise a child for each script, and wait until the scripts have set what they do at signals."""
    path = tmp_path / "log"
    with path.open("w+b") as log:
        supervisor = Supervisor([WorkerSettings()] * len(scripts), log)
        for child, script in zip(supervisor.children, scripts, strict=True):
            set_program(script)
            child.start()
        try:
            wait_until(lambda: path.read_bytes().count(b"ready") == len(scripts), "the children are ready")
            yield supervisor
        finally:
            for child in supervisor.children:
                child.signal(signal.SIGKILL)


def test_several_children_that_hang_are_killed_and_released_at_the_same_time(
    set_program: SetProgram,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    n_children = 4
    barrier = threading.Barrier(n_children)
    set_release(monkeypatch, lambda: barrier.wait(2 * LONG_S))
    monkeypatch.setattr(Supervisor, "KILL_AFTER_S", KILL_AFTER_S)
    monkeypatch.setattr(supervisor_module, "RELEASE_TIMEOUT_S", LONG_S)
    with supervising(tmp_path, set_program, *[HANGS] * n_children) as supervisor:
        started_s = time.monotonic()
        assert not supervisor.stop()
        took_s = time.monotonic() - started_s
    assert caplog.text.count("child.killed") == n_children
    assert took_s < KILL_AFTER_S + LONG_S, "no release waits for another one"


def test_the_jobs_of_a_child_that_dies_while_another_one_hangs_are_released_at_once(
    set_program: SetProgram,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    n_killed: list[int] = []

    def record_and_end_the_wait() -> None:
        n_killed.append(caplog.text.count("child.killed"))
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + LONG_S, sleep=time.sleep)
        monkeypatch.setattr(supervisor_module, "time", clock)

    set_release(monkeypatch, record_and_end_the_wait)
    monkeypatch.setattr(Supervisor, "KILL_AFTER_S", LONG_S)
    with supervising(tmp_path, set_program, HANGS, DIES_AT_THE_SECOND_SIGNAL) as supervisor:
        assert not supervisor.stop()
    assert n_killed == [0, 1]
