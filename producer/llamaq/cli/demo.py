"""`llamaq demo`: eight jobs side by side through one batch, in a live view, with everything started for it."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.resources import files
from typing import BinaryIO

from rich.console import Console
from rich.live import Live

from llamaq.cli.demo_view import Stream, View, stats_table
from llamaq.common.errors import JobFailed, LlamaqError
from llamaq.producer import AsyncClient
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.local.local_stack import end_on_sigterm, noted_signals
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings, load_settings

START_TIMEOUT_S = 120.0
LOOK_EVERY_S = 0.1
"""How often the worker is looked at."""
LEAVE_S = 2.0
FRAMES_PER_S = 15
LINE_CHARS = 72


def demo_streams(count: int) -> list[Stream]:
    """The jobs that ship with the demo model, repeated when more are asked for."""
    prompts = json.loads(files("llamaq.worker").joinpath("model", "demo_prompts.json").read_text())
    streams = []
    for index in range(count):
        params = dict(prompts[index % len(prompts)])
        streams.append(Stream(params.pop("title"), {**params, "temperature": 0.0}))
    return streams


def show(count: int, model: str | None) -> int:
    """Run the demo; returns the exit code. Leaves no process behind, also when it is interrupted."""
    console = Console(highlight=False)
    # A model this small computes a tick in less time than two threads need to agree on it.
    n_threads = 1 if model is None else None
    settings = load_settings(
        model=model, n_parallel=min(count, 8), n_threads=n_threads, heartbeat_s=LOOK_EVERY_S, max_queue=0
    )
    what = "the small model that ships with llamaq" if model is None else model
    console.print(f"{count} jobs, one worker with {settings.n_parallel} slots, {what}.", markup=False)
    view = View(demo_streams(count))
    with tempfile.TemporaryFile() as log_file:
        try:
            with end_on_sigterm():
                _run(console, settings, log_file, view)
        except KeyboardInterrupt:
            console.print("Interrupted; everything that was started has been stopped.")
            return 130
        except LlamaqError as exc:
            console.print(f"{type(exc).__name__}: {exc}", style="red", markup=False)
            log_file.seek(0)
            console.print(log_file.read().decode(errors="replace")[-2000:], markup=False)
            return 1
    console.print(stats_table(view.streams))
    console.print(f"{count} jobs together:{view.footer()}", markup=False)
    return 1 if any(stream.has_failed for stream in view.streams) else 0


def _run(console: Console, settings: WorkerSettings, log_file: BinaryIO, view: View) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        supervisor = Supervisor([settings.model_copy(update={"redis_url": redis.url})], log_file)
        stack.callback(supervisor.stop)
        supervisor.start()
        signals = stack.enter_context(noted_signals())
        asyncio.run(_watch(console, AsyncClient(redis.url, settings.queue), partial(_check, supervisor, signals), view))


def _check(supervisor: Supervisor, signals: list[int]) -> None:
    """Look after the worker; raises `LlamaqError` when it cannot start, and what the user's signals mean."""
    if signals:
        raise KeyboardInterrupt
    if supervisor.check() is not None:
        raise LlamaqError("the worker cannot start; its log:")


async def _watch(console: Console, client: AsyncClient, check: Callable[[], None], view: View) -> None:
    async with client:
        with console.status("Loading the model …") if console.is_terminal else nullcontext():
            while view.worker is None:
                await _look(client, check, view)
                if view.elapsed_s > START_TIMEOUT_S:
                    raise LlamaqError(f"the worker is not ready after {START_TIMEOUT_S:g} s; its log:")
        view.started_s = time.monotonic()
        live = Live(view, console=console, refresh_per_second=FRAMES_PER_S, vertical_overflow="crop")
        with live if console.is_terminal else nullcontext():
            jobs = [asyncio.create_task(_follow(console, client, stream)) for stream in view.streams]
            try:
                while not all(job.done() for job in jobs):
                    await _look(client, check, view)
            finally:
                for job in jobs:
                    job.cancel()
                await asyncio.wait(jobs, timeout=LEAVE_S)
            for job in jobs:
                job.result()
            view.ended_s = time.monotonic()


async def _look(client: AsyncClient, check: Callable[[], None], view: View) -> None:
    check()
    view.worker = next(iter(await client.workers()), None)
    await asyncio.sleep(LOOK_EVERY_S)


async def _follow(console: Console, client: AsyncClient, stream: Stream) -> None:
    """Submit one job and show what comes."""
    try:
        job = await client.submit(**stream.params)
        async for chunk in job.stream():
            stream.text += chunk.text
            stream.n_tokens += len(chunk.tokens)
            if not console.is_terminal:
                _print_lines(console, stream)
        result = await job.result()
        stream.stats, stream.ending = result.stats, result.finish_reason.value
    except JobFailed as failed:
        stream.ending = failed.code
        stream.text += failed.message
    if not console.is_terminal:
        _print_lines(console, stream)


def _print_lines(console: Console, stream: Stream) -> None:
    """Print the lines that are full, and when the job has ended what is left."""
    while pending := stream.text[stream.n_printed :]:
        if len(pending) > LINE_CHARS:
            n_chars = max(0, pending.rfind(" ", 1, LINE_CHARS)) or LINE_CHARS
        elif stream.ending:
            n_chars = len(pending)
        else:
            return
        stream.n_printed += n_chars
        line = " ".join(pending[:n_chars].split())
        console.print(f"{stream.title:>20} | {line}", markup=False, soft_wrap=True)
