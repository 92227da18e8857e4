"""`llamaq.producer.sync` is generated from the asyncio client and up to date."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from llamaq.producer import AsyncClient, AsyncJob, AsyncStream, Client, Job, Stream
from llamaq.tools.sync_client import __main__ as command
from llamaq.tools.sync_client import generator


@pytest.mark.starts_processes  # the generator runs ruff
def test_the_committed_blocking_client_equals_the_generated_one() -> None:
    assert generator.SYNC_PATH.read_text() == generator.generate(), "run: python -m llamaq.tools.sync_client"


@pytest.mark.starts_processes
def test_check_fails_for_an_outdated_file_and_does_not_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sync.py"
    path.write_text("stale\n")
    monkeypatch.setattr(command, "SYNC_PATH", path)
    assert command.main(["--check"]) == 1
    assert path.read_text() == "stale\n"
    assert "python -m llamaq.tools.sync_client" in capsys.readouterr().err
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0


@pytest.mark.parametrize(("blocking", "asynchronous"), [(Client, AsyncClient), (Job, AsyncJob), (Stream, AsyncStream)])
def test_both_clients_have_the_same_documentation(blocking: type, asynchronous: type) -> None:
    for name, method in vars(blocking).items():
        if inspect.isfunction(method) and name != "__init__":
            other = inspect.getdoc(getattr(asynchronous, name)) or ""
            for asyncio_words, words in (("AsyncJob", "Job"), ("AsyncStream", "Stream"), ("async for", "for")):
                other = other.replace(asyncio_words, words)
            assert inspect.getdoc(method) == other, name
    assert "Async" not in (blocking.__doc__ or "")
    assert "async " not in (blocking.__doc__ or "")
    assert "event loop" not in (blocking.__doc__ or "")
