"""Runs `llamaq` commands in the test process."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from llamaq.cli.exit_codes import EXIT_FAILED
from llamaq.cli.main import build_app, main
from llamaq.producer import Client


def llamaq(*args: str, stdin: str = "") -> str:
    """Run a command that succeeds and return its output."""
    result = CliRunner().invoke(build_app(args[0]), args, input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def failing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str, code: int = EXIT_FAILED
) -> str:
    """Run a command that fails with this exit code, and return its error. The error is one line."""
    monkeypatch.setattr(sys, "argv", ["llamaq", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (code, "")
    assert err.count("\n") == 1
    assert err.startswith("llamaq: ")
    return err


def submit(redis_url: str, queue: str) -> str:
    with Client(redis_url, queue) as client:
        return client.submit("one two").id
