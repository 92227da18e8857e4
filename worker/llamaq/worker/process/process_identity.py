"""Identifies the process of a worker, and tells whether the process of another worker still exists on this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TypedDict

from llamaq.common.protocol.queue_and_worker_state import WorkerCard

PROC = Path("/proc")
ENDED_STATES = frozenset("ZX")
"""States in `/proc/PID/stat` of a process that has ended and that its parent has not waited for."""


def make_worker_id(pid: int, token: str) -> str:
    """Return the id of the worker in the process `pid` of this host. `token` differs when a `pid` is used again."""
    return f"{socket.gethostname()}-{pid}-{token}"


class ProcessIdentity(TypedDict):
    """The fields of `WorkerCard` that identify a process. No two processes have the same values of all these fields."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    pid_started: int


def identify_this_process() -> ProcessIdentity:
    """Return the identity of this process. Without `/proc`, some of its fields are empty."""
    pid, stat = os.getpid(), _read_stat(os.getpid())
    return ProcessIdentity(
        host=socket.gethostname(),
        boot_id=_read_boot_id(),
        pid_namespace=_read_pid_namespace(),
        pid=pid,
        pid_started=0 if stat is None else stat[1],
    )


def is_dead_here(card: WorkerCard) -> bool:
    """Return whether the worker's process ran on this machine and has ended.

    False when this is not known, because the process ran on another machine, before a reboot, or in another container.
    """
    here = (socket.gethostname(), _read_boot_id(), _read_pid_namespace())
    if not all(here) or here != (card.host, card.boot_id, card.pid_namespace) or not card.pid_started:
        return False
    try:
        os.kill(card.pid, 0)  # sends nothing. Unlike /proc, it also sees the processes of other users
    except ProcessLookupError:
        return True
    except OSError:
        return False
    stat = _read_stat(card.pid)
    return stat is not None and (stat[0] in ENDED_STATES or stat[1] != card.pid_started)


def _read_boot_id() -> str:
    """Return the id of this boot of the machine; empty if it is not known."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _read_pid_namespace() -> str:
    """Return the namespace of this process's pid, which differs between containers; empty if it is not known."""
    try:
        return str((PROC / "self/ns/pid").readlink())
    except OSError:
        return ""


def _read_stat(pid: int) -> tuple[str, int] | None:
    """Return the state of a process and its start time in clock ticks after the boot. None: it is not known."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
