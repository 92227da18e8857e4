"""The command `llamaq top`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import Any

import pytest
from tests.support.command_line import failing, llamaq
from tests.support.dead_letters import add_dead_letters
from tests.support.terminal import CTRL_C, Terminal
from tests.support.worker_cards import KilledWorker
from typer.testing import CliRunner

from llamaq.cli.main import build_app
from llamaq.producer import AsyncClient


async def fill(url: str, queue: str) -> str:
    """Add two dead letters, announce a worker, and let it run one job. Returns the id of the dead job."""
    dead, _ = await add_dead_letters(url, queue)
    async with AsyncClient(url, queue) as client, KilledWorker(url, queue) as worker:
        await worker.announce()
        await client.submit("x")
        await (await worker.start_next()).answer(["one", "two", "three"])
    return dead


def test_once_prints_tables_for_people_and_one_object_for_programs(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    dead = asyncio.run(fill(redis_url, queue))
    options = ["top", "--once", "--interval", "0.1", "--queue", queue]
    text = llamaq(*options)
    for title in ("queue", "workers", "recent", "dead"):
        assert f"{title}" in text
    assert dead in text, "no id is cut"
    found: dict[str, Any] = json.loads(llamaq(*options, "--json"))
    (line,) = found["queues"]
    assert (line["queue"], line["mode"], line["workers"], line["dead_letters"]) == (queue, "open", 1, 2)
    assert [worker["worker"] for worker in found["workers"]] == ["fake"]
    assert found["recent"][0]["generated_tokens"] == 3
    assert {letter["letter_id"] for letter in found["dead"]} >= {dead}
    assert found["interval_s"] == 0.1
    assert found["total"]["queue"] == "(all)"


def test_without_a_terminal_the_view_names_the_other_form(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "llamaq top --once" in failing(monkeypatch, capsys, "top", "--redis-url", redis_url, code=2)
    assert CliRunner().invoke(build_app("top"), ["top", "--json"]).exit_code == 2
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "llamaq[top]" in failing(monkeypatch, capsys, "top", "--redis-url", redis_url)


@pytest.mark.parametrize("name", ["a*", "a}b", "a[/b]"])
def test_a_name_that_no_queue_can_have_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--queue" in failing(monkeypatch, capsys, "top", "--once", "--queue", "a", "--queue", name, code=2)


@pytest.mark.parametrize("command", [("top", "--once"), ("depth", "--watch")])
@pytest.mark.parametrize("interval_s", ["inf", "1e300"])
def test_the_interval_has_an_upper_bound(command: tuple[str, ...], interval_s: str, redis_url: str) -> None:
    arguments = [*command, "--interval", interval_s, "--redis-url", redis_url]
    ended = CliRunner().invoke(build_app(command[0]), arguments)
    assert ended.exit_code == 2
    assert "'--interval'" in ended.output


@pytest.mark.starts_processes
def test_the_view_runs_in_a_terminal_until_ctrl_c(redis_url: str, queue: str) -> None:
    with Terminal("top", "--redis-url", redis_url, "--queue", queue, TERM="xterm-256color") as terminal:
        terminal.read_until("1 workers")
        terminal.read_until("0 waiting")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
