"""The common parts of all benchmarks: command line, Redis with workers, facts about the machine, and the output.

A benchmark is a function from a `Plan` to its figures. It is passed to `run`. Progress and tables are printed on
standard error. Standard output gets one line of JSON: benchmark, model, seed, hardware, versions, commit, figures.
"""

from __future__ import annotations

import asyncio
import gc
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
from llamaq.common.protocol.queue_and_worker_state import Worker
from llamaq.producer import AsyncClient
from llamaq.worker.cpu_cores import usable_cores
from llamaq.worker.engine.model_files import demo_model_path
from llamaq.worker.local.embedded_redis import EmbeddedRedis, find_server
from llamaq.worker.local.stop_signals import interrupt_on_sigterm
from llamaq.worker.process.compiled_modules import has_compiled_ticks
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings, load_settings

START_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 900.0
EXIT_INTERRUPTED = 130
ROOT = Path(__file__).resolve().parent.parent

Result = TypeVar("Result")
Figures = dict[str, Any]

console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of the command line."""

    model: Path
    quick: bool
    rounds: int
    n_threads: int
    seed: int
    folders: tuple[Path, ...] = ()
    """The folders with data that the command line names."""

    def settings(self, **values: Any) -> WorkerSettings:
        """Return the settings of a worker for this plan; `values` are additional settings."""
        return load_settings(model=str(self.model), n_threads=self.n_threads, log_level="warning", **values)


@dataclass(frozen=True, slots=True)
class Stack:
    """A running Redis with one worker for each queue. All workers are ready."""

    redis: EmbeddedRedis
    workers: Mapping[str, Worker]
    """Maps the name of each queue to its worker."""

    @property
    def worker(self) -> Worker:
        """The first worker."""
        return next(iter(self.workers.values()))

    def run(self, work: Callable[[AsyncClient], Coroutine[Any, Any, Result]], queue: str = "default") -> Result:
        """Call `work` with a client of the queue, in a new event loop, and return its result.

        Before that, a job of one token opens the connections of the client, because they are open in a running backend
        too. This job does not use the prefix cache.
        """

        async def connected() -> Result:
            async with AsyncClient(self.redis.url, queue, timeout_s=JOB_TIMEOUT_S) as client:
                await client.generate_tokens([1], max_tokens=1, cache_prompt=False)
                return await work(client)

        return asyncio.run(connected())


def run(measure: Callable[[Plan], Figures], default_model: str = "", *, needs_folders: bool = False) -> None:
    """Parse the command line, call `measure`, and print the line of JSON. All started processes are stopped.

    Args:
        measure: Runs the benchmark.
        default_model: The model without `--model`. "": `demo` for a quick run, otherwise `tiny`.
        needs_folders: Whether the command line names folders with data.
    """

    def main(
        model: Annotated[str, typer.Option(help=f"{' | '.join(random_models.SHAPES)} | demo | a GGUF file")] = "",
        quick: Annotated[bool, typer.Option(help="Run for seconds only, as a test; the figures mean nothing.")] = False,
        rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; figures are medians over the rounds.")] = 3,
        n_threads: Annotated[int, typer.Option(min=0, help="Threads of llama.cpp; 0: all cores except one.")] = 0,
        seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 1,
        folders: Annotated[list[Path] | None, typer.Argument(exists=True, file_okay=False, hidden=True)] = None,
    ) -> None:
        if bool(folders) != needs_folders:
            raise typer.BadParameter("name a folder with data" if needs_folders else "this benchmark reads no folder")
        model_name = model or default_model or ("demo" if quick else "tiny")
        threads = n_threads or max(1, usable_cores() - 1)  # Redis and the client need a core too
        try:
            with interrupt_on_sigterm():
                n_rounds = 1 if quick else rounds
                plan = Plan(find_model(model_name), quick, n_rounds, threads, seed, tuple(folders or ()))
                about = facts()
                gc.freeze()  # otherwise a collection in the client visits all that was imported, which takes 50 ms
                figures = measure(plan)
        except KeyboardInterrupt:
            console.print("Interrupted. All started processes are stopped.")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except LlamaqError as exc:
            console.print(f"[red]{type(exc).__name__}[/]: {exc}")
            raise typer.Exit(1) from exc
        options = {"model": model_name, "quick": quick, "rounds": plan.rounds, "n_threads": threads, "seed": seed}
        emit({"benchmark": Path(sys.argv[0]).stem, **options, **about, "figures": figures})

    main.__doc__ = sys.modules["__main__"].__doc__
    typer.run(main)


def emit(result: Mapping[str, Any]) -> None:
    """Print the line of JSON on standard output."""
    print(json.dumps(result), flush=True)


def find_model(name: str) -> Path:
    """Return the file of a model.

    Args:
        name: Name of a random-weight model, "demo", or the path of a GGUF file.

    Raises:
        ModelError: `name` is neither a name nor the path of a file.
    """
    if name in random_models.SHAPES:
        return random_models.ensure(name)
    path = demo_model_path() if name == "demo" else Path(name).expanduser()
    if not path.is_file():
        raise ModelError(f"--model: {name!r} is neither the name of a model nor a file")
    return path


@contextmanager
def start_stack(workers: Sequence[WorkerSettings]) -> Iterator[Stack]:
    """Start a Redis and these workers, each with a separate queue. On an error, print the log of the workers."""
    with ExitStack() as exits:
        log_file = exits.enter_context(tempfile.TemporaryFile())
        redis = exits.enter_context(EmbeddedRedis())
        supervisor = Supervisor([one.model_copy(update={"redis_url": redis.url}) for one in workers], log_file)
        exits.callback(supervisor.stop)
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
                        raise LlamaqError("a worker did not start; its log is printed above")
                    await asyncio.sleep(0.05)
            ready[queue] = found[0]
    return ready


def _show_log(log_file: BinaryIO) -> None:
    log_file.seek(0)
    console.print(log_file.read().decode(errors="replace")[-4000:], markup=False, highlight=False)


def path_with_this_folder() -> str:
    """Return a `PYTHONPATH` with which a worker's process can import the modules of this folder."""
    folders = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, folders))


def facts() -> Figures:
    """Return date, hardware, versions, commit, and whether the worker's ticks are compiled."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {
            "cpu": _first_match(r"model name\s*: (.+)", _read("/proc/cpuinfo")) or platform.machine(),
            "cores": usable_cores(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpu_offload": bool(llama_cpp.llama_supports_gpu_offload()),
            "gpu": _output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]) or None,
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            "redis-server": _first_match(r"v=(\S+)", _output_of([str(find_server()), "--version"])),
            **{name: version(name) for name in ("llamaq", "llama-cpp-python", "redis", "numpy")},
        },
        "compiled": has_compiled_ticks(),
        "commit": _output_of(["git", "rev-parse", "HEAD"]) or None,
        "changed_since_commit": bool(_output_of(["git", "status", "--porcelain"])),
    }


def _first_match(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1].strip() if match else None


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def _output_of(command: Sequence[str]) -> str:
    """Return the standard output of a command; an empty string if the command fails or is not installed."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def note(text: str) -> None:
    """Print a progress message on standard error."""
    console.print(text, style="dim", highlight=False)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on standard error. The first column is text, the others are numbers."""
    table = Table(title=title)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(f"{cell:,.1f}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)
