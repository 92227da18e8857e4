"""How many CPUs other programs of this host keep busy.

The kernel counts the time of each CPU in hundredths of a second, so a measurement takes half a second. Time in which
a hypervisor runs other virtual machines ("steal") counts as time of other programs. Programs with a lower priority
(nice) do not count, unless this process has a lower priority too: they only get what it leaves over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
"""Has a line for each CPU: `cpu0 user nice system idle iowait irq softirq steal guest guest_nice`, see proc(5)."""
USER, NICE, SYSTEM, IRQ, SOFTIRQ, STEAL = 1, 2, 3, 6, 7, 8
"""Numbers of the columns with busy time. `user` and `nice` contain the time of guests."""
MEASURE_EVERY_S = 0.5


class _Reading(NamedTuple):
    """Times in seconds, up to a moment."""

    at_s: float
    busy_s: float
    """Busy time of the CPUs, those of this process included."""
    own_s: float
    """Processor time of this process."""


class OtherPrograms:
    """Measures the processor time of other programs on some CPUs.

    Args:
        cpus: The numbers of the CPUs.
        stat: The file with the times of the CPUs.
        clock: Returns the time in seconds.
        own_time: Returns the processor time of this process in seconds.
    """

    def __init__(
        self,
        cpus: Iterable[int],
        stat: Path = STAT,
        *,
        clock: Callable[[], float] = time.monotonic,
        own_time: Callable[[], float] = time.process_time,
    ) -> None:
        self._names = {f"cpu{cpu}".encode() for cpu in cpus}
        self._stat = stat
        self._clock = clock
        self._own_time = own_time
        self._columns = [USER, SYSTEM, IRQ, SOFTIRQ, STEAL]
        if os.getpriority(os.PRIO_PROCESS, 0) > 0:
            self._columns.append(NICE)
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._last: _Reading | None = None
        self._n_busy = 0.0

    def n_busy_cpus(self) -> float:
        """Return how many CPUs other programs kept busy on average, in the last measurement. 0: it is not known."""
        if self._last is None or self._clock() - self._last.at_s >= MEASURE_EVERY_S:
            with suppress(OSError):  # a sandbox may hide the file
                self._measure()
        return self._n_busy

    def _measure(self) -> None:
        """Measure since the last reading, and read again."""
        reading = _Reading(self._clock(), self._busy_s(), self._own_time())
        if (last := self._last) is not None:
            others_s = (reading.busy_s - last.busy_s) - (reading.own_s - last.own_s)
            self._n_busy = max(0.0, others_s / (reading.at_s - last.at_s))
        self._last = reading

    def _busy_s(self) -> float:
        lines = (line.split() for line in self._stat.read_bytes().splitlines() if line.startswith(b"cpu"))
        n_ticks = sum(int(line[column]) for line in lines if line[0] in self._names for column in self._columns)
        return n_ticks / self._ticks_per_s
