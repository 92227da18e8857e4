"""What all benchmarks share: the command line, a Redis with workers, facts about the machine, and the last line.

A benchmark is a function from a `Plan` to its figures, given to `run`. What people read goes to standard error;
the one line on standard output is JSON: benchmark, model, seed, hardware, versions, commit, figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import llama_cpp
import typer
from rich.console import Console
from rich.table import Table

import random_models
from llamaq.common.errors import LlamaqError, ModelError
from llamaq.common.protocol.queue_state import Worker
from llamaq.producer import AsyncClient
from llamaq.worker.engine.model_files import demo_model_path
from llamaq.worker.local.embedded_redis import EmbeddedRedis, find_server
from llamaq.worker.local.local_stack import end_on_sigterm
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings, load_settings, usable_cores

START_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 900.0
EXIT_INTERRUPTED = 130
ROOT = Path(__file__).resolve().parent.parent

Result = TypeVar("Result")
Figures = dict[str, Any]

console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command line asks for."""

    model: Path
    quick: bool
    rounds: int
    n_threads: int
    seed: int

    def settings(self, **values: Any) -> WorkerSettings:
        """A worker's settings for this plan."""
        return load_settings(model=str(self.model), n_threads=self.n_threads, log_level="warning", **values)


@dataclass(frozen=True, slots=True)
class Stack:
    """A Redis and its workers, one for each queue, all ready."""

    redis: EmbeddedRedis
    workers: Mapping[str, Worker]
    """By queue."""

    @property
    def worker(self) -> Worker:
        """The only worker, or the first."""
        return next(iter(self.workers.values()))

    def run(self, work: Callable[[AsyncClient], Coroutine[Any, Any, Result]], queue: str = "default") -> Result:
        """Run this with a client of a queue, in an event loop of its own, so that other things can be timed between.

        A job of one token comes first, past the prefix cache: like a backend that runs for long, the client has its
        connections then.
        """

        async def connected() -> Result:
            async with AsyncClient(self.redis.url, queue, timeout_s=JOB_TIMEOUT_S) as client:
                await client.generate_tokens([1], max_tokens=1, cache_prompt=False)
                return await work(client)

        return asyncio.run(connected())


def run(measure: Callable[[Plan], Figures]) -> None:
    """The command line of a benchmark: measure, then print the line of JSON. Leaves no process behind."""

    def main(
        model: Annotated[str, typer.Option(help=f"{' | '.join(random_models.SHAPES)} | demo | a GGUF file")] = "",
        quick: Annotated[bool, typer.Option(help="A smoke run of seconds; its figures mean nothing.")] = False,
        rounds: Annotated[int, typer.Option(min=1, help="Figures are medians of so many rounds.")] = 3,
        n_threads: Annotated[int, typer.Option(min=0, help="Of llama.cpp; 0: all cores but one.")] = 0,
        seed: Annotated[int, typer.Option(help="Of prompts and sampling.")] = 1,
    ) -> None:
        named = model or ("demo" if quick else "tiny")
        threads = n_threads or max(1, usable_cores() - 1)  # Redis and the client need a core too
        try:
            with end_on_sigterm():
                plan = Plan(find_model(named), quick, 1 if quick else rounds, threads, seed)
                about = facts()
                figures = measure(plan)
        except KeyboardInterrupt:
            console.print("Interrupted; everything that was started has been stopped.")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except LlamaqError as exc:
            console.print(f"[red]{type(exc).__name__}[/]: {exc}")
            raise typer.Exit(1) from exc
        run_with = {"model": named, "quick": quick, "rounds": plan.rounds, "n_threads": threads, "seed": seed}
        emit({"benchmark": Path(sys.argv[0]).stem, **run_with, **about, "figures": figures})

    main.__doc__ = sys.modules["__main__"].__doc__
    typer.run(main)


def emit(result: Mapping[str, Any]) -> None:
    """The one line of JSON on standard output."""
    print(json.dumps(result), flush=True)


def find_model(name: str) -> Path:
    """The file of a named random-weight model, of the demo model, or a path. Raises `ModelError`."""
    if name in random_models.SHAPES:
        return random_models.ensure(name)
    path = demo_model_path() if name == "demo" else Path(name).expanduser()
    if not path.is_file():
        raise ModelError(f"--model: no model is named {name!r}, and there is no such file")
    return path


@contextmanager
def stack(workers: Sequence[WorkerSettings]) -> Iterator[Stack]:
    """A Redis and these workers, which have queues of their own; when something fails, their log is shown."""
    with ExitStack() as ends:
        log_file = ends.enter_context(tempfile.TemporaryFile())
        redis = ends.enter_context(EmbeddedRedis())
        supervisor = Supervisor([one.model_copy(update={"redis_url": redis.url}) for one in workers], log_file)
        ends.callback(supervisor.stop)
        supervisor.start()
        queues = [one.queue for one in workers]
        try:
            yield Stack(redis, asyncio.run(_await_workers(redis.url, queues, supervisor)))
        except Exception:
            _show_log(log_file)
            raise


async def _await_workers(url: str, queues: Sequence[str], supervisor: Supervisor) -> dict[str, Worker]:
    ready: dict[str, Worker] = {}
    async with asyncio.timeout(START_TIMEOUT_S):
        for queue in queues:
            async with AsyncClient(url, queue) as client:
                while not (found := await client.workers()):
                    if supervisor.check() is not None:
                        raise LlamaqError("a worker cannot start; its log is above")
                    await asyncio.sleep(0.05)
            ready[queue] = found[0]
    return ready


def _show_log(log_file: BinaryIO) -> None:
    log_file.seek(0)
    console.print(log_file.read().decode(errors="replace")[-4000:], markup=False, highlight=False)


def facts() -> Figures:
    """Hardware, versions and commit, as they are now."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {
            "cpu": _first_match(r"model name\s*: (.+)", _read("/proc/cpuinfo")) or platform.machine(),
            "cores": usable_cores(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpu_offload": bool(llama_cpp.llama_supports_gpu_offload()),
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            "redis-server": _first_match(r"v=(\S+)", _output_of([str(find_server()), "--version"])),
            **{name: version(name) for name in ("llamaq", "llama-cpp-python", "redis", "numpy")},
        },
        "commit": _output_of(["git", "rev-parse", "HEAD"]) or None,
        "changed_since_commit": bool(_output_of(["git", "status", "--porcelain"])),
    }


def _first_match(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1].strip() if match else None


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def _output_of(command: Sequence[str]) -> str:
    """What it prints; nothing where it fails or is missing."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def note(text: str) -> None:
    """Progress, for people."""
    console.print(text, style="dim", highlight=False)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table, for people; the first column is text."""
    table = Table(title=title)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(f"{cell:,.1f}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)
