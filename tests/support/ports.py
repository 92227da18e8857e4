"""TCP ports that belong to one test process.

A port that the system gives out (`bind` to port 0) is free only until another process asks for one. Before a test's
server listens on it, or while that server is down, the system may give it to any other server or connection. The ports
here are below the range from which the system takes such ports, and each one is reserved by a lock on a file until the
process ends. On a port without a server, connections are therefore refused.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

HOST = "127.0.0.1"
FIRST, END = 11_000, 21_000
CLUSTER_BUS_OFFSET = 10_000
"""A cluster server listens on its port and on a second port, this much higher, which is below that range too."""


def reserve_ports(count: int) -> list[int]:
    """Return ports that no other test uses before this process ends. The second ports of cluster servers are free too.

    Raises:
        RuntimeError: All ports are taken.
    """
    folder = Path(tempfile.gettempdir()) / f"llamaq-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    found: list[int] = []
    for port in random.sample(range(FIRST, END), END - FIRST):
        if _reserve(folder / str(port)) and _is_free(port) and _is_free(port + CLUSTER_BUS_OFFSET):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"all ports from {FIRST} to {END - 1} are taken")


def reserve_port() -> int:
    """Return one port. See `reserve_ports`."""
    return reserve_ports(1)[0]


def _reserve(path: Path) -> bool:
    """Lock the file until the process ends, and return whether that succeeded."""
    lock = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    return True


def _is_free(port: int) -> bool:
    """Return whether no socket of any program has the port."""
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
