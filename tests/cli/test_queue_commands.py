"""The commands for a queue, with a fake worker."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest
from tests.support.command_line import failing, llamaq

from llamaq.producer import QueueStats, Worker
from llamaq.producer.testing import FakeWorker


def test_snapshots_are_tables_for_people_and_json_for_programs(served: str) -> None:
    llamaq("generate", "one two three")
    assert llamaq("depth") == "0 waiting, 0 running\n"
    assert json.loads(llamaq("depth", "--json")) == {"waiting": 0, "running": 0}
    assert "fake" in llamaq("workers")
    assert Worker.model_validate_json(llamaq("workers", "--json")).card.queue == served
    table = llamaq("stats")
    assert served in table
    assert "last jobs" in table
    assert QueueStats.model_validate_json(llamaq("stats", "--json")).recent[0].generated_tokens == 3


def test_health_requires_a_worker_on_this_host_with_a_recent_tick(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--redis-url", redis_url, "--queue", queue, "--max-age-s", "30"]
    assert "no worker on this host" in failing(monkeypatch, capsys, "health", *options)
    assert "no worker serves" in failing(monkeypatch, capsys, "health", *options, "--any")

    def announce(**heartbeat: Any) -> None:
        async def send_heartbeat() -> None:
            async with FakeWorker(redis_url, queue) as worker:
                await worker.announce(**heartbeat)

        asyncio.run(send_heartbeat())

    now_ms = int(time.time() * 1000)
    announce(now_ms=now_ms)
    assert "no worker on this host" in failing(monkeypatch, capsys, "health", *options)
    assert llamaq("health", *options, "--any") == f"ok: fake serves {queue}\n"
    announce(now_ms=now_ms, host=socket.gethostname())
    assert llamaq("health", *options) == f"ok: fake serves {queue}\n"
    announce(now_ms=now_ms, host=socket.gethostname(), tick_age_ms=40_000)
    assert "the last tick of fake is 4" in failing(monkeypatch, capsys, "health", *options)
    announce(now_ms=now_ms - 60_000, host=socket.gethostname())
    assert "the last tick of fake is 6" in failing(monkeypatch, capsys, "health", *options)
    assert "Redis" in failing(monkeypatch, capsys, "health", "--redis-url", "redis://127.0.0.1:1")
