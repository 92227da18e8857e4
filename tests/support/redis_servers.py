"""Real redis-servers in the arrangements that people run: a master with a replica and Sentinels, and a cluster.

All of one arrangement run in one folder, on free ports of 127.0.0.1, and end with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError

from llamaq.worker.local.embedded_redis import find_server

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
SLOTS = 16384
SERVICE = "llamaq-master"


def free_ports(count: int, highest: int = 55_000) -> list[int]:
    """Return free ports, at most `highest`: the bus of a cluster uses the ports that are 10,000 higher."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
        if port not in found and port <= highest:
            found.append(port)
    return found


def await_that(condition: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait until `condition` returns something true. An error of Redis counts as false."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


@dataclass(eq=False)
class Server:
    """One process of redis-server. It may be killed and started again with its data."""

    folder: Path
    port: int
    options: tuple[str, ...] = ()
    config: str | None = None
    """Given to Sentinels, which want a file of their own to write to."""
    environment: dict[str, str] = field(default_factory=dict)
    """Added to ours."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self, *more: str) -> None:
        """Start the server and wait until it answers. `more` are options of this start."""
        home = self.folder / str(self.port)
        home.mkdir(exist_ok=True)
        command = [str(find_server())]
        if self.config is not None:
            (home / "server.conf").write_text(self.config)
            command += [str(home / "server.conf"), "--sentinel"]
        command += ["--port", str(self.port), "--bind", HOST, "--dir", str(home), *self.options, *more]
        with (home / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        with self.client() as client:
            await_that(client.ping, f"an answer of {self}")

    def client(self) -> Redis:
        return Redis(host=HOST, port=self.port, socket_timeout=5.0)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the server, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __repr__(self) -> str:
        return f"<Server port={self.port} pid={self.process.pid if self.process else None}>"


class Arrangement(ABC):
    """Servers that start and end together."""

    servers: list[Server]
    url: str
    """What llamaq connects to."""

    @abstractmethod
    def start(self) -> None:
        """Start all of them, and return when they serve."""

    def stop(self) -> None:
        """End all of them at once."""
        for server in self.servers:
            server.kill()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


SENTINEL_CONFIG = """
sentinel monitor {service} {host} {port} {quorum}
sentinel down-after-milliseconds {service} {down_ms}
sentinel failover-timeout {service} 2000
"""
IN_MEMORY = ("--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0")


class Watched(Arrangement):
    """A master and a replica, watched by Sentinels, which agree in a majority that one is down."""

    def __init__(self, folder: Path, *, n_sentinels: int = 3, down_ms: int = 500) -> None:
        one, other, *rest = free_ports(2 + n_sentinels)
        self.data = [Server(folder, one, IN_MEMORY), Server(folder, other, IN_MEMORY)]
        config = SENTINEL_CONFIG.format(
            service=SERVICE, host=HOST, port=one, quorum=n_sentinels // 2 + 1, down_ms=down_ms
        )
        self.sentinels = [Server(folder, port, config=config) for port in rest]
        self.servers = [*self.data, *self.sentinels]
        self.url = f"redis+sentinel://{','.join(f'{HOST}:{port}' for port in rest)}/{SERVICE}"

    def start(self) -> None:
        """See `Arrangement.start`."""
        self.data[0].start()
        self.data[1].start("--replicaof", HOST, str(self.data[0].port))
        with self.data[1].client() as client:
            await_that(lambda: client.info("replication")["master_link_status"] == "up", "a replica in step")
        for sentinel in self.sentinels:
            sentinel.start()
        await_that(self._know_each_other, "Sentinels that know of each other and of the replica")

    def _know_each_other(self) -> bool:
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                state: Any = client.sentinel_master(SERVICE)
            if state["num-slaves"] != 1 or state["num-other-sentinels"] != len(self.sentinels) - 1:
                return False
        return True

    @property
    def master(self) -> Server:
        """The master, according to the first Sentinel."""
        with self.sentinels[0].client() as client:
            place: Any = client.sentinel_get_master_addr_by_name(SERVICE)
        return next(server for server in self.data if server.port == int(place[1]))

    def agree_on(self, server: Server) -> bool:
        """Whether every Sentinel names this server as the master."""
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                place: Any = client.sentinel_get_master_addr_by_name(SERVICE)
            if int(place[1]) != server.port:
                return False
        return True

    def await_master(self, server: Server) -> None:
        """Wait until the first Sentinel names this server as the master, and the server has that role."""

        def leads() -> bool:
            with server.client() as client:
                role: Any = client.role()
            return self.master is server and role[0] in (b"master", "master")

        await_that(leads, f"{server} as the master")


CLUSTER_OPTIONS = (
    *("--cluster-enabled", "yes", "--cluster-node-timeout", "800", "--cluster-require-full-coverage", "no"),
    *("--cluster-replica-validity-factor", "0", *IN_MEMORY),
)


class Nodes(Arrangement):
    """A cluster of masters with equal shares of the slots, each with some replicas."""

    def __init__(self, folder: Path, *, n_masters: int = 3, n_replicas: int = 0) -> None:
        ports = free_ports(n_masters * (1 + n_replicas))
        self.servers = [Server(folder, port, CLUSTER_OPTIONS) for port in ports]
        self.masters = self.servers[:n_masters]
        self.replicas = {
            master: self.servers[n_masters + place * n_replicas : n_masters + (place + 1) * n_replicas]
            for place, master in enumerate(self.masters)
        }
        self.url = "redis+cluster://" + ",".join(f"{HOST}:{server.port}" for server in self.servers)

    def start(self) -> None:
        """See `Arrangement.start`."""
        for server in self.servers:
            server.start()
        for place, master in enumerate(self.masters):
            first, end = (SLOTS * (place + step) // len(self.masters) for step in (0, 1))
            _cluster(master, "ADDSLOTS", *range(first, end))
            _cluster(master, "SET-CONFIG-EPOCH", place + 1)
        for server in self.servers[1:]:
            _cluster(self.servers[0], "MEET", HOST, server.port)
        self._await_everywhere("cluster_known_nodes", str(len(self.servers)))
        for master, replicas in self.replicas.items():
            name = _cluster(master, "MYID")
            for replica in replicas:
                self._attach(replica, name)
        self._await_everywhere("cluster_state", "ok")

    def _attach(self, replica: Server, master_name: str) -> None:
        _cluster(replica, "REPLICATE", master_name)
        with replica.client() as client:
            await_that(lambda: client.info("replication")["master_link_status"] == "up", f"{replica} in step")

    def _await_everywhere(self, name: str, value: str) -> None:
        await_that(
            lambda: all(_cluster(server, "INFO")[name] == value for server in self.servers),
            f"{name} {value} everywhere",
        )

    def master_of(self, slot: int) -> Server:
        """Return the server that has the slot, according to the first living server."""
        for server in self.servers:
            if server.process is None:
                continue
            for start, end, owner, *_ in _cluster(server, "SLOTS"):
                if start <= slot <= end:
                    return next(one for one in self.servers if one.port == owner[1])
        raise AssertionError(f"no master has slot {slot}")


def _cluster(server: Server, command: str, *arguments: object) -> Any:
    """Return the answer of the server to `CLUSTER command`."""
    with server.client() as client:
        execute: Any = client.execute_command
        return execute(f"CLUSTER {command}", *arguments)
