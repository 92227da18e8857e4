"""The CPU cores that this process may use: the default number of llama.cpp's threads.

Two hardware threads of one core are hardly faster than one, and llama.cpp waits in each step for the slowest thread. If
a container has more threads than its quota of CPU time allows, the kernel stops threads in the middle of a step.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")


def usable_cpus(chosen: frozenset[int] = frozenset()) -> frozenset[int]:
    """Return the chosen CPUs that this process may use; all that it may use if none is chosen. Only on Linux."""
    allowed = frozenset(os.sched_getaffinity(0))
    return allowed & chosen if chosen else allowed


def usable_cores(chosen: frozenset[int] = frozenset()) -> int:
    """Return the number of physical CPU cores that this process may use, at most its quota of CPU time, at least 1.

    Args:
        chosen: Only cores with these CPUs count. Empty: all cores.
    """
    if not hasattr(os, "sched_getaffinity"):  # not on Linux
        return os.cpu_count() or 1
    n_cores = len({_core_of(cpu) for cpu in usable_cpus(chosen)})
    quota = cpu_quota(CGROUPS, Path("/proc/self/cgroup"))
    return max(1, n_cores if quota is None else min(n_cores, int(quota)))


def cpu_quota(mount: Path, membership: Path) -> float | None:
    """Return the CPU time per second that the control groups of this process allow. None: no limit.

    Args:
        mount: Where the file system of control groups is mounted.
        membership: The file that names the groups of the process.
    """
    quotas: list[float] = []
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "cpu" in controllers.split(","):
                root = mount if controllers == "" else mount / controllers
                # In a container, the file contains the path on the host, and only the group itself is mounted.
                group = root / path.lstrip("/")
                quotas += [found for folder in (group, *group.parents) if (found := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _quota_of(group: Path) -> float | None:
    """Return the limit of one control group: `cpu.max` of version 2, or the two files of version 1."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)  # "max" is no number: there is no limit
    with suppress(OSError, ValueError, ZeroDivisionError):
        micros = int((group / "cpu.cfs_quota_us").read_text())
        return micros / int((group / "cpu.cfs_period_us").read_text()) if micros > 0 else None
    return None


def _core_of(cpu: int) -> str:
    """Return a text that identifies the core of a hardware thread: the list of all hardware threads of the core."""
    try:
        return (CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
