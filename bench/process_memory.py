"""The memory that a process holds."""

from __future__ import annotations

from pathlib import Path


def resident_kb(pid: int | str) -> int:
    """Return the resident memory of a process in KiB. `self` is this process."""
    return _status_kb(pid, "VmRSS")


def peak_kb(pid: int | str) -> int:
    """Return the largest resident memory that a process has had, in KiB."""
    return _status_kb(pid, "VmHWM")


def _status_kb(pid: int | str, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
