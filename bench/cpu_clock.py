"""Processor time of a worker, of Redis and of the benchmark."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from harness import Stack


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Processor time of a worker, of Redis and of this process. Other load on the machine changes it little."""

    stack: Stack
    queue: str = "default"

    def read(self) -> dict[str, float]:
        """Return the processor seconds that each process has used so far. Without /proc the dict is empty."""
        redis_pid = self.stack.redis.pid
        if redis_pid is None or not Path("/proc/self/stat").exists():
            return {}
        worker_pid = self.stack.workers[self.queue].card.pid
        return {"worker": cpu_s(worker_pid), "redis": cpu_s(redis_pid), "client": time.process_time()}

    def us_per_token(self, before: dict[str, float], n_tokens: int) -> dict[str, float]:
        """Return the microseconds per token of each process since `before`, the result of an earlier `read`."""
        now = self.read()
        return {name: round((now[name] - before[name]) * 1e6 / n_tokens, 1) for name in now}


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used so far."""
    # man 5 proc_pid_stat: field 2 is the name in parentheses, fields 14 and 15 are utime and stime.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
