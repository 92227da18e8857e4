"""Starts a worker and an HTTP server for each llama-server that a test wants, as forks of one prepared process.

A test waits for each start of its server. The forks need no imports, so they start within a fraction of a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

import redis
from tests.conformance.server_flags import StackSettings, read_flags
from tests.conformance.stand_in_models import StandInModels

from llamaq.common.logging_setup import LogFormat, configure_logging
from llamaq.gateway.http_keys import HttpKeys
from llamaq.gateway.keys.key_record import KeyRecord, hash_of
from llamaq.gateway.settings import serve_settings
from llamaq.gateway.uvicorn_server import bind, build_server
from llamaq.producer import AsyncClient
from llamaq.producer.queries.queue_snapshots import read_workers
from llamaq.worker.process.worker_process import serve as serve_worker
from llamaq.worker.settings import load_settings

log = logging.getLogger(__name__)

POLL_S = 0.02
START_TIMEOUT_S = 40.0
MAX_REQUEST_BYTES = 65536


class StackHost:
    """Accepts the connections of shims, and forks a stack for each. It must stay without threads."""

    def __init__(self, path: Path, redis_url: str, models: StandInModels) -> None:
        self._redis_url = redis_url
        self._models = models
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._stacks: set[int] = set()

    def poll(self, timeout_s: float) -> None:
        """Start a stack if a shim asks for one, and reap those that have ended."""
        readable, _, _ = select.select([self._listening], [], [], timeout_s)
        if readable:
            connection, _ = self._listening.accept()
            with connection:
                if (pid := os.fork()) == 0:
                    self._listening.close()
                    _run_stack(connection, self._redis_url, self._models)
                self._stacks.add(pid)
        self._stacks = {pid for pid in self._stacks if not _has_ended(pid)}

    def close(self) -> None:
        """End the stacks of shims that were not stopped."""
        for pid in self._stacks:
            os.kill(pid, signal.SIGTERM)


def _run_stack(connection: socket.socket, redis_url: str, models: StandInModels) -> None:
    """Serve one shim, and end this process. If the stack does not start, the shim gets the reason."""
    worker = 0
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        with connection.makefile("rb") as lines:
            request = json.loads(lines.readline(MAX_REQUEST_BYTES))
        chosen = read_flags(request["flags"], Path(request["folder"]), models)
        configure_logging("info", LogFormat.TEXT)
        log.info("stack.start flags=%s", request["flags"])
        _prepare_redis(redis_url, chosen)
        worker = _fork_worker(redis_url, chosen)
        asyncio.run(_serve(connection, redis_url, chosen, worker))
    except BaseException as exc:  # noqa: BLE001  # a fork must not return into the code of its parent
        traceback.print_exc()
        with suppress(OSError):
            connection.sendall(repr(exc).encode()[:1000])
    finally:
        if worker:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        os._exit(0)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def _prepare_redis(redis_url: str, chosen: StackSettings) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
        if chosen.api_key is not None:
            record = KeyRecord(name="conformance", created_ms=0)
            client.hset(HttpKeys("llamaq").http_keys(), hash_of(chosen.api_key), record.model_dump_json())


def _fork_worker(redis_url: str, chosen: StackSettings) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            settings = load_settings(**chosen.worker, redis_url=redis_url, queue=chosen.queue, heartbeat_s=0.05)
            code = serve_worker(settings)
        except BaseException:  # noqa: BLE001  # a fork must not return into the code of its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


async def _serve(connection: socket.socket, redis_url: str, chosen: StackSettings, worker: int) -> None:
    """Serve until the shim closes its side of the connection."""
    settings = serve_settings(
        **chosen.serve,
        http_host=chosen.hosts[0],
        redis_url=redis_url,
        queue=chosen.queue,
        require_key=chosen.api_key is not None,
        shutdown_s=0,
    )
    await _wait_for_worker(redis_url, chosen.queue, worker)
    sockets = [bind(settings.model_copy(update={"http_host": host})) for host in chosen.hosts]
    server = build_server(settings)
    loop = asyncio.get_running_loop()
    connection.settimeout(0)

    def stop() -> None:
        loop.remove_reader(connection)
        server.should_exit = server.force_exit = True

    loop.add_reader(connection, stop)
    await server.serve(sockets)


def _has_ended(pid: int) -> bool:
    return bool(os.waitpid(pid, os.WNOHANG)[0])


async def _wait_for_worker(redis_url: str, queue: str, worker: int) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        client = AsyncClient(redis_url, queue=queue)
        try:
            while not await read_workers(client.connection, queue):
                if _has_ended(worker):
                    raise RuntimeError("the worker has not started: the log has its reason")
                await asyncio.sleep(POLL_S)
        finally:
            await client.aclose()
