"""Supervised children that die early. Their programs are shell scripts, which run no worker."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.redis_servers import wait_until

from llamaq.worker.process import supervised_child
from llamaq.worker.process.supervised_child import SupervisedChild
from llamaq.worker.settings import WorkerSettings

pytestmark = pytest.mark.starts_processes
DIES = "exit 1"
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
