"""The embedded redis-server of `llamaq up`, `llamaq demo` and the tests."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from redis import Redis
from redis.exceptions import BusyLoadingError, RedisError

from llamaq.common.errors import EmbeddedRedisError
from llamaq.worker.local import embedded_redis
from llamaq.worker.local.embedded_redis import EmbeddedRedis, find_server

START_AND_WAIT = """
import sys
from llamaq.worker.local.embedded_redis import EmbeddedRedis

server = EmbeddedRedis()
server.start()
print(server.pid, server.url, flush=True)
sys.stdin.read()
"""


def wait_for_end_of(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/exe").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_a_port_the_server_listens_on_a_private_socket_only() -> None:
    with EmbeddedRedis() as server, Redis.from_url(server.url) as redis:
        assert redis.ping()
        assert server.url.startswith("unix://")
        assert redis.config_get("port") == {"port": "0"}
        socket = Path(server.url.removeprefix("unix://"))
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert redis.config_get("appendfsync") == {"appendfsync": "no"}, "this file is not read after a power cut"
        assert repr(server) == f"<EmbeddedRedis {server.url} pid={server.pid}>"
    assert not socket.parent.exists()
    assert server.pid is None


def test_with_a_port_the_server_listens_on_this_machine_only(free_port: int) -> None:
    with EmbeddedRedis(port=free_port) as server, Redis.from_url(server.url) as redis:
        assert server.url == f"redis://127.0.0.1:{free_port}/0"
        assert redis.config_get("bind") == {"bind": "127.0.0.1"}


def test_with_a_folder_the_server_stores_its_data(tmp_path: Path) -> None:
    for round_number in range(2):
        with EmbeddedRedis(data_dir=tmp_path / "new" / "data") as server, Redis.from_url(server.url) as redis:
            assert redis.incr("rounds") == round_number + 1
            assert redis.config_get("appendfsync") == {"appendfsync": "everysec"}


def test_a_killed_server_has_all_data_after_a_restart(tmp_path: Path) -> None:
    server = EmbeddedRedis(data_dir=tmp_path)
    server.start()
    with Redis.from_url(server.url) as redis:
        redis.set("key", "value")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    with EmbeddedRedis(data_dir=tmp_path) as again, Redis.from_url(again.url) as redis:
        assert redis.get("key") == b"value"


def test_a_folder_in_use_is_refused_and_the_first_server_keeps_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "LOCK_TIMEOUT_S", 0.1)
    with EmbeddedRedis(data_dir=tmp_path) as first, Redis.from_url(first.url) as redis:
        with pytest.raises(EmbeddedRedisError, match=r"--data-dir: another Redis of `llamaq up` .*: name another"):
            EmbeddedRedis(data_dir=tmp_path).start()
        redis.set("key", "value")
    with EmbeddedRedis(data_dir=tmp_path) as again, Redis.from_url(again.url) as redis:
        assert redis.get("key") == b"value"


def test_a_folder_on_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded_redis, "lock_folder", Mock(side_effect=OSError(errno.EOPNOTSUPP, "Not supported")))
    with EmbeddedRedis(data_dir=tmp_path / "data") as server, Redis.from_url(server.url) as redis:
        assert redis.set("key", "value")
    assert any(record.getMessage().startswith("redis.not_locked data_dir=") for record in caplog.records)
    monkeypatch.setattr(embedded_redis, "lock_folder", Mock(side_effect=OSError(errno.EACCES, "Permission denied")))
    with pytest.raises(EmbeddedRedisError, match="Permission denied"):
        EmbeddedRedis(data_dir=tmp_path / "data").start()


def test_a_server_that_outlives_its_process_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Linux's prctl, the server of a killed `llamaq up` continues."""
    first = EmbeddedRedis(data_dir=tmp_path)
    first.start()
    assert first._lock is not None
    os.close(first._lock)  # as the kernel does when the process is killed
    first._lock = None
    monkeypatch.setattr(embedded_redis, "LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(EmbeddedRedisError, match="another Redis"):
        EmbeddedRedis(data_dir=tmp_path).start()
    monkeypatch.setattr(embedded_redis, "LOCK_TIMEOUT_S", 30.0)
    second = EmbeddedRedis(data_dir=tmp_path)
    stopping = threading.Thread(target=first.stop)
    stopping.start()
    second.start()  # not in a thread: the kernel ends the server when the thread that has started it ends
    stopping.join()
    with Redis.from_url(second.url) as redis:
        assert redis.ping()
    second.stop()


def check_until_started(server: EmbeddedRedis, old_pid: int) -> int:
    """Call `check` until another process of the server answers, and return its process id."""
    deadline = time.monotonic() + 60
    while True:
        server.check()
        if server.pid not in (None, old_pid):
            with suppress(RedisError), Redis.from_url(server.url) as redis:
                if redis.ping():
                    assert server.pid is not None
                    return server.pid
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check_repeatedly(server: EmbeddedRedis) -> None:
    """Call `check` for up to a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        server.check()
        time.sleep(0.01)


@pytest.mark.parametrize("has_folder", [True, False], ids=["a folder of the user", "the private folder"])
def test_check_restarts_a_killed_server_with_its_data_at_the_same_place(
    has_folder: bool, free_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedRedis(port=free_port, data_dir=tmp_path if has_folder else None) as server:
        url = server.url
        with Redis.from_url(url) as redis:
            redis.set("key", "value")
        server.check()
        pid = server.pid
        assert pid is not None
        for _ in range(2):
            os.kill(pid, signal.SIGKILL)
            pid = check_until_started(server, pid)
        with Redis.from_url(url) as redis:
            assert redis.get("key") == b"value"
        assert server.url == url
    assert "redis.died" in caplog.text
    assert "it ended with code -9" in caplog.text


def test_check_tries_again_when_no_process_can_be_started_at_the_moment(caplog: pytest.LogCaptureFixture) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with EmbeddedRedis() as server:
        old_pid = server.pid
        assert old_pid is not None
        os.kill(old_pid, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            while "redis-server cannot be started: [Errno 24]" not in caplog.text:
                server.check()
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        check_until_started(server, old_pid)


def test_check_raises_the_reason_when_restarts_fail(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "MAX_FAILED_RESTARTS", 2)
    with EmbeddedRedis(port=free_port, data_dir=tmp_path) as server:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_for_end_of(server.pid)
        with EmbeddedRedis(port=free_port), pytest.raises(EmbeddedRedisError, match=f"port {free_port} is in use"):
            check_repeatedly(server)


def test_a_server_that_loads_its_data_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real_ping, real_clock = Redis.ping, time.monotonic
    n_pings = 0

    def ping(redis: Redis) -> Any:
        nonlocal n_pings
        if n_pings == 5:
            return real_ping(redis)
        n_pings += 1
        raise BusyLoadingError("Redis is loading the dataset in memory")

    monkeypatch.setattr(Redis, "ping", ping)
    monkeypatch.setattr(time, "monotonic", lambda: real_clock() + n_pings * 0.9 * embedded_redis.START_TIMEOUT_S)
    with EmbeddedRedis() as server, Redis.from_url(server.url) as redis:
        assert redis.ping()
        assert n_pings == 5


def test_the_error_for_a_port_in_use_names_the_options_that_help(free_port: int) -> None:
    with EmbeddedRedis(port=free_port) as first:
        with pytest.raises(EmbeddedRedisError, match=f"port {free_port} is in use: choose another with --port"):
            EmbeddedRedis(port=free_port).start()
        assert Redis.from_url(first.url).ping()


def test_a_path_that_no_socket_can_have_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    began_s = time.monotonic()
    with pytest.raises(EmbeddedRedisError, match=r"more than 10\d bytes: .*: set TMPDIR to a shorter path"):
        EmbeddedRedis().start()
    assert time.monotonic() - began_s < embedded_redis.START_TIMEOUT_S / 2
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("log_text", "reason"),
    [
        (
            "1:M 1 Jan # Warning: Could not create server TCP listening socket: bind: Address already in use",
            "port 7 is",
        ),
        ("1:M 1 Jan # Opening Unix socket: bind: Address already in use", "Opening Unix socket: bind: Address"),
        ("1:M 1 Jan # Out of memory\n1:M 1 Jan # WARNING Memory overcommit must be enabled!", "0: Out of memory$"),
    ],
)
def test_the_error_has_the_reason_and_no_advice_on_the_system(log_text: str, reason: str) -> None:
    server = EmbeddedRedis(port=7)
    assert re.search(reason, str(server._start_error(log_text)))
    server.stop()


def test_an_interrupted_start_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedRedis()
    pids: list[int] = []

    def interrupt() -> bool:
        assert server.pid is not None
        pids.append(server.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "_poll_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert server.pid is None
    wait_for_end_of(pids[0])


def test_the_error_contains_the_log_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_bytes(b"this is no command\r\n" * 100)
    (tmp_path / "appendonlydir").write_text("not a folder")  # Redis 7 stores its append-only files in this folder
    with pytest.raises(EmbeddedRedisError, match=r"redis-server does not start at unix://") as caught:
        EmbeddedRedis(data_dir=tmp_path).start()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) > 80


def test_a_server_may_be_stopped_twice_and_before_its_start() -> None:
    server = EmbeddedRedis()
    server.stop()
    server.stop()


def test_the_error_for_a_missing_binary_names_the_ways_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EmbeddedRedisError, match=r"install llamaq\[worker\].*--redis-url"):
        find_server()


def test_a_binary_on_the_path_is_used_if_none_is_bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path = tmp_path / "redis-server"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    bundled = find_server()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == bundled
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert find_server() == on_path


@pytest.mark.skipif(sys.platform != "linux", reason="prctl exists on Linux only")
def test_the_server_ends_with_the_process_that_started_it_and_the_next_one_removes_its_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = str(tmp_path_factory.mktemp("t"))
    monkeypatch.setenv("TMPDIR", temporary)
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    with subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid, url = process.stdout.readline().split()
        with Redis.from_url(url) as redis:
            assert redis.ping()
        process.kill()
    wait_for_end_of(int(pid))
    folder = Path(url.removeprefix("unix://")).parent
    assert folder.exists(), "nothing removes the folder when the process is killed"
    deadline = time.monotonic() + 10
    while folder.exists():  # the kernel closes the files of the server a moment after its end
        assert time.monotonic() < deadline
        EmbeddedRedis().stop()
        time.sleep(0.01)


def test_ctrl_c_in_the_terminal_does_not_reach_the_server() -> None:
    with EmbeddedRedis() as server:
        assert server.pid is not None
        assert os.getpgid(server.pid) != os.getpgid(0)
