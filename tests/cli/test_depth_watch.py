"""The command `llamaq depth --watch`."""

from __future__ import annotations

import json
import re

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.fake_redis import replace_redis
from tests.support.terminal import CTRL_C, Terminal

from llamaq.cli.depth_watch import changes_per_s, json_line, text_line, watch
from llamaq.producer import Client, QueueDepth, QueueMode


def test_a_line_has_the_depth_and_its_changes_per_second() -> None:
    before, after = QueueDepth(waiting=10, running=4), QueueDepth(waiting=4, running=5, mode=QueueMode.PAUSED)
    changes = changes_per_s(before, after, 2.0)
    assert changes == (-3.0, 0.5)
    assert text_line(after, changes, 0.0)[8:] == "  4 waiting, 5 running, paused  (waiting -3.0/s, running +0.5/s)"
    assert text_line(before, (None, None), 0.0)[8:] == "  10 waiting, 4 running  (waiting -, running -)"
    found = json.loads(json_line(after, changes, 1.5))
    assert (found["time_ms"], found["waiting"], found["mode"]) == (1500, 4, "paused")
    assert (found["waiting_per_s"], found["running_per_s"]) == (-3.0, 0.5)
    assert changes_per_s(before, after, 0.0) == (None, None)


def test_an_outage_after_the_first_line_is_a_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = RedisConnectionError("refused")
    readings: list[QueueDepth | RedisConnectionError]
    readings = [QueueDepth(waiting=1, running=0), refused, QueueDepth(waiting=2, running=0), refused]

    def read(client: Client) -> QueueDepth:
        reading = readings.pop(0)
        if isinstance(reading, RedisConnectionError):
            raise reading
        return reading

    monkeypatch.setattr(Client, "queue_depth", read)
    with Client(replace_redis(monkeypatch)) as client:
        watch(client, 0.01, as_json=True, n_lines=3)
        out, err = capsys.readouterr()
        first, second = map(json.loads, out.splitlines())
        assert (first["waiting"], first["waiting_per_s"], second["waiting"]) == (1, None, 2)
        assert second["waiting_per_s"] > 0
        assert err.count("\n") == 1
        assert "Redis does not answer" in err
        with pytest.raises(RedisConnectionError):
            watch(client, 0.01, as_json=True, n_lines=1)


@pytest.mark.starts_processes
def test_ctrl_c_ends_the_command(redis_url: str, queue: str) -> None:
    with (
        Client(redis_url, queue) as client,
        Terminal("depth", "--watch", "--interval", "0.1", "--redis-url", redis_url, "--queue", queue) as terminal,
    ):
        assert re.fullmatch(r"\d\d:\d\d:\d\d  0", terminal.read_until(" waiting, 0 running  (waiting -, running -)"))
        client.submit("x")
        terminal.read_until("1 waiting, 0 running  (waiting +")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
