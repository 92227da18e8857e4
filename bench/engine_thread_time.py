"""Measures how the engine thread of a worker spends its time. A hook in the process of the worker does this.

Start the workers with `hooks=(HOOK,)` within `stopwatches_in_workers()`. `read_totals` then returns the times of one
worker's engine thread. There are four stopwatches:

- all public methods of `Scheduler`, and those of `RepeatedTicks` between two batches: the time of all decisions;
- all public methods of `KvMemory`: the part of the decisions about KV cells (slots, sequences, prefix cache, offload);
- `Engine.run`: llama.cpp and sampling;
- the methods of `KvSequences` that move cells: copy, cut, remove, save, load.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.kv_sequences import KvSequences
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.scheduling.repeated_ticks import RepeatedTicks
from llamaq.worker.scheduling.scheduler import Scheduler

HOOK = "engine_thread_time:record"
FOLDER = "BENCH_TOTALS_FOLDER"
"""Environment variable: the folder in which each worker's process writes its totals."""
WAIT_S = 10.0


@dataclass(slots=True)
class Totals:
    """Times of one worker's engine thread since its first job.

    `memory_s` is included in `scheduler_s`, and `moves_s` is included in both.
    """

    jobs: int = 0
    ticks: int = 0
    scheduler_s: float = 0.0
    memory_s: float = 0.0
    moves_s: float = 0.0
    engine_s: float = 0.0

    def since(self, before: Totals) -> Totals:
        """Return these totals minus earlier totals."""
        now, then = asdict(self), asdict(before)
        return Totals(**{name: now[name] - then[name] for name in now})

    @property
    def busy_s(self) -> float:
        """Busy time of the engine thread."""
        return self.scheduler_s + self.engine_s


class Stopwatch:
    """Adds up the time of the wrapped calls of one thread. A call inside another wrapped call adds no time."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0

    def wrap(self, owner: type, *names: str) -> None:
        """Replace methods of a class by methods that measure their time."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.total_s += time.perf_counter() - started_s

        return timed


class Stopwatches:
    """The stopwatches in the process of a worker, and the file with their totals."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.json"
        self._totals = Totals()
        self._scheduler, self._memory, self._moves, self._engine = (Stopwatch() for _ in range(4))
        self._scheduler.wrap(Scheduler, *_public(Scheduler))
        self._scheduler.wrap(RepeatedTicks, "next_batch", "preparation")
        self._memory.wrap(KvMemory, *_public(KvMemory))
        self._engine.wrap(Engine, "run")
        self._moves.wrap(KvSequences, "copy", "cut", "remove", "save", "load")

    def count_tick(self) -> None:
        self._totals.ticks += 1

    def count_job(self) -> None:
        """Count a job and write the totals to the file."""
        totals = self._totals
        totals.jobs += 1
        totals.scheduler_s, totals.memory_s = self._scheduler.total_s, self._memory.total_s
        totals.moves_s, totals.engine_s = self._moves.total_s, self._engine.total_s
        unfinished = self._path.with_suffix(".new")
        unfinished.write_text(json.dumps(asdict(totals)))
        unfinished.replace(self._path)


def _public(owner: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(owner, inspect.isfunction) if not name.startswith("_")}


@functools.cache
def _stopwatches() -> Stopwatches:
    return Stopwatches(Path(os.environ[FOLDER]))


def record(name: str, _: Mapping[str, Any]) -> None:
    """Receive a measurement in the worker's process. The first call installs the stopwatches."""
    if name == "tick":
        _stopwatches().count_tick()
    else:
        _stopwatches().count_job()


@contextmanager
def stopwatches_in_workers() -> Iterator[Path]:
    """Yield the folder of the totals. Workers that start in this context can import this module as a hook."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]))
        os.environ |= {FOLDER: folder, "PYTHONPATH": path}
        yield Path(folder)


def read_totals(folder: Path, pid: int, n_jobs: int) -> Totals:
    """Return a worker's totals as soon as it has counted `n_jobs` jobs.

    The worker may call the hook shortly after the subscriber has received the end of the job. Therefore this function
    waits up to `WAIT_S`.
    """
    deadline_s = time.monotonic() + WAIT_S
    while (totals := _read(folder / f"{pid}.json")).jobs < n_jobs:
        if time.monotonic() > deadline_s:
            sys.exit(f"{totals.jobs} of {n_jobs} jobs were measured within {WAIT_S:g} s")
        time.sleep(0.01)
    return totals


def _read(path: Path) -> Totals:
    return Totals(**json.loads(path.read_text())) if path.exists() else Totals()
