"""How a worker's engine thread spends its time, measured in the worker's own process by a hook.

`hooks=("engine_thread_time:record",)` and `watched()` around the start of the workers; `read_totals` then says what the engine
thread of one of them did so far. Stopwatches stand around every public method of `Scheduler` (what is decided), of
`KvMemory` (the part of it that is about KV cells: slots, sequences, prefix cache, tiers), around `Engine.run`
(llama.cpp and sampling), and around the methods of `KvSequences` that move cells: copy, cut, remove, save, load.
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
from llamaq.worker.scheduling.scheduler import Scheduler

HOOK = "engine_thread_time:record"
FOLDER = "BENCH_TOTALS_FOLDER"
"""Environment variable: where each worker's process writes its totals."""
WAIT_S = 10.0


@dataclass(slots=True)
class Totals:
    """Of one worker's engine thread, since its first job. `memory_s` is a part of `scheduler_s`, `moves_s` of both."""

    jobs: int = 0
    ticks: int = 0
    scheduler_s: float = 0.0
    memory_s: float = 0.0
    moves_s: float = 0.0
    engine_s: float = 0.0

    def since(self, before: Totals) -> Totals:
        """What was added."""
        now, then = asdict(self), asdict(before)
        return Totals(**{name: now[name] - then[name] for name in now})

    @property
    def busy_s(self) -> float:
        """All that the engine thread did."""
        return self.scheduler_s + self.engine_s


class Stopwatch:
    """The time within the outermost of the calls that it stands around; for one thread."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0

    def stand_around(self, owner: type, *names: str) -> None:
        """Time these methods of a class from now on."""
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


class Watch:
    """The stopwatches of this process, and its file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.json"
        self._totals = Totals()
        self._scheduler, self._memory, self._moves, self._engine = (Stopwatch() for _ in range(4))
        self._scheduler.stand_around(Scheduler, *_public(Scheduler))
        self._memory.stand_around(KvMemory, *_public(KvMemory))
        self._engine.stand_around(Engine, "run")
        self._moves.stand_around(KvSequences, "copy", "cut", "remove", "save", "load")

    def tick(self) -> None:
        self._totals.ticks += 1

    def job(self) -> None:
        """Write the totals down."""
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
def _watch() -> Watch:
    return Watch(Path(os.environ[FOLDER]))


def record(name: str, _: Mapping[str, Any]) -> None:
    """The hook, in the worker's process; the first measurement brings the stopwatches in."""
    if name == "tick":
        _watch().tick()
    else:
        _watch().job()


@contextmanager
def watched() -> Iterator[Path]:
    """For workers that are started meanwhile: the folder of their totals, and this module to be found by them."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]))
        os.environ |= {FOLDER: folder, "PYTHONPATH": path}
        yield Path(folder)


def read_totals(folder: Path, pid: int, n_jobs: int) -> Totals:
    """A worker's totals when so many jobs have ended; the hook hears of an end a little after the job's reader."""
    until_s = time.monotonic() + WAIT_S
    while (totals := _read(folder / f"{pid}.json")).jobs < n_jobs:
        if time.monotonic() > until_s:
            sys.exit(f"{totals.jobs} of {n_jobs} jobs were measured within {WAIT_S:g} s")
        time.sleep(0.01)
    return totals


def _read(path: Path) -> Totals:
    return Totals(**json.loads(path.read_text())) if path.exists() else Totals()
