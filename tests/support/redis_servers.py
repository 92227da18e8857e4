"""Groups of real redis-servers: a master with a replica and Sentinels, and a cluster.

The servers of a group run in one folder, on reserved ports of 127.0.0.1, and are killed when the group's context ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError
from tests.support.ports import HOST, reserve_ports

from llamaq.worker.local.embedded_redis import find_server

START_TIMEOUT_S = 60.0
SLOTS = 16384
SERVICE = "llamaq-master"


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait until `condition` returns a true value. An error of Redis in `condition` counts as false."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


@dataclass(eq=False)
class Server:
    """One process of redis-server. After `kill`, `start` runs it again with the same data."""

    folder: Path
    port: int
    options: tuple[str, ...] = ()
    config: str | None = None
    """The configuration file of a Sentinel, which the Sentinel rewrites. None for other servers."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that are added to those of this process."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self, *extra_options: str) -> None:
        """Start the server and wait until it replies. `extra_options` apply to this start only."""
        home = self.folder / str(self.port)
        home.mkdir(exist_ok=True)
        drop_unfinished_transaction(home / "appendonly.aof")
        command = [str(find_server())]
        if self.config is not None:
            (home / "server.conf").write_text(self.config)
            command += [str(home / "server.conf"), "--sentinel"]
        command += ["--port", str(self.port), "--bind", HOST, "--dir", str(home), *self.options, *extra_options]
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
            wait_until(client.ping, f"{self} replies")

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


def drop_unfinished_transaction(aof: Path) -> None:
    """Remove a transaction from the end of an append-only file whose last write was cut by SIGKILL.

    Redis 6.2 removes only the last, incomplete command. The commands before it run at the start after the next one, as
    part of the next transaction, although no client got a reply to them. `docs/redis.md` says what this means for jobs.
    """
    data = aof.read_bytes() if aof.exists() else b""
    begin = data.rfind(b"*1\r\n$5\r\nMULTI\r\n")
    if begin >= 0 and b"*1\r\n$4\r\nEXEC\r\n" not in data[begin:]:
        aof.write_bytes(data[:begin])


class ServerGroup(ABC):
    """Servers that start and end together."""

    servers: list[Server]
    url: str
    """The URL of the group for llamaq."""

    @abstractmethod
    def start(self) -> None:
        """Start all servers, and wait until they serve."""

    def stop(self) -> None:
        """Kill all servers."""
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


class SentinelServers(ServerGroup):
    """A master and a replica that Sentinels watch. A majority of the Sentinels must agree that a server is down."""

    def __init__(self, folder: Path, *, n_sentinels: int = 3, down_ms: int = 500) -> None:
        master_port, replica_port, *sentinel_ports = reserve_ports(2 + n_sentinels)
        self.data = [Server(folder, master_port, IN_MEMORY), Server(folder, replica_port, IN_MEMORY)]
        config = SENTINEL_CONFIG.format(
            service=SERVICE, host=HOST, port=master_port, quorum=n_sentinels // 2 + 1, down_ms=down_ms
        )
        self.sentinels = [Server(folder, port, config=config) for port in sentinel_ports]
        self.servers = [*self.data, *self.sentinels]
        self.url = f"redis+sentinel://{','.join(f'{HOST}:{port}' for port in sentinel_ports)}/{SERVICE}"

    def start(self) -> None:
        """See `ServerGroup.start`."""
        self.data[0].start()
        self.data[1].start("--replicaof", HOST, str(self.data[0].port))
        with self.data[1].client() as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica is in sync")
        for sentinel in self.sentinels:
            sentinel.start()
        wait_until(self._know_each_other, "all Sentinels know each other and the replica")

    def _know_each_other(self) -> bool:
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                state: Any = client.sentinel_master(SERVICE)
            if state["num-slaves"] != 1 or state["num-other-sentinels"] != len(self.sentinels) - 1:
                return False
        return True

    @property
    def master(self) -> Server:
        """The master that the first Sentinel names."""
        with self.sentinels[0].client() as client:
            place: Any = client.sentinel_get_master_addr_by_name(SERVICE)
        return next(server for server in self.data if server.port == int(place[1]))

    def agree_on(self, server: Server) -> bool:
        """Return whether every Sentinel names this server as the master."""
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                place: Any = client.sentinel_get_master_addr_by_name(SERVICE)
            if int(place[1]) != server.port:
                return False
        return True

    def await_master(self, server: Server) -> None:
        """Wait until the first Sentinel names this server as the master, and the server has that role."""

        def is_master() -> bool:
            with server.client() as client:
                role: Any = client.role()
            return self.master is server and role[0] in (b"master", "master")

        wait_until(is_master, f"{server} is the master")


CLUSTER_OPTIONS = (
    *("--cluster-enabled", "yes", "--cluster-node-timeout", "800", "--cluster-require-full-coverage", "no"),
    *("--cluster-replica-validity-factor", "0", *IN_MEMORY),
)


class ClusterServers(ServerGroup):
    """A cluster whose masters have equal shares of the hash slots. Each master has `n_replicas` replicas."""

    def __init__(self, folder: Path, *, n_masters: int = 3, n_replicas: int = 0) -> None:
        ports = reserve_ports(n_masters * (1 + n_replicas))
        self.servers = [Server(folder, port, CLUSTER_OPTIONS) for port in ports]
        self.masters = self.servers[:n_masters]
        self.replicas = {
            master: self.servers[n_masters + place * n_replicas : n_masters + (place + 1) * n_replicas]
            for place, master in enumerate(self.masters)
        }
        self.url = "redis+cluster://" + ",".join(f"{HOST}:{server.port}" for server in self.servers)

    def start(self) -> None:
        """See `ServerGroup.start`."""
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
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", f"{replica} is in sync")

    def _await_everywhere(self, name: str, value: str) -> None:
        wait_until(
            lambda: all(_cluster(server, "INFO")[name] == value for server in self.servers),
            f"{name} is {value} on every server",
        )

    @contextmanager
    def slot_moves(self, slot: int, new: Server, *moved_first: str) -> Iterator[None]:
        """Move a hash slot to another master. The block runs while only the keys `moved_first` have moved.

        With IMPORTING, the new master gets a new epoch at the end. Otherwise, the old master could take the slot back.
        """
        old = self.master_of(slot)
        with old.client() as at_old:
            _cluster(new, "SETSLOT", slot, "IMPORTING", _cluster(old, "MYID").decode())
            _cluster(old, "SETSLOT", slot, "MIGRATING", _cluster(new, "MYID").decode())
            for key in moved_first:
                at_old.execute_command("MIGRATE", HOST, new.port, key, 0, 1000)
            yield
            for key in _cluster(old, "GETKEYSINSLOT", slot, 1000):
                at_old.execute_command("MIGRATE", HOST, new.port, key, 0, 1000)
            for server in (new, old):
                _cluster(server, "SETSLOT", slot, "NODE", _cluster(new, "MYID").decode())

    def master_of(self, slot: int) -> Server:
        """Return the master of a hash slot, according to the first running server."""
        for server in self.servers:
            if server.process is None:
                continue
            for start, end, owner, *_ in _cluster(server, "SLOTS"):
                if start <= slot <= end:
                    return next(one for one in self.servers if one.port == owner[1])
        raise AssertionError(f"no master has slot {slot}")


def _cluster(server: Server, command: str, *arguments: object) -> Any:
    """Return the server's reply to `CLUSTER command`."""
    with server.client() as client:
        execute: Any = client.execute_command
        return execute(f"CLUSTER {command}", *arguments)
