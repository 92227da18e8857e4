"""`llamaq demo`: starts Redis and a worker, submits eight jobs, and shows in a live view how they stream."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from importlib.resources import files
from typing import BinaryIO

from redis.exceptions import ConnectionError as RedisConnectionError
from rich.console import Console
from rich.live import Live

from llamaq.cli.columns import replace_unencodable
from llamaq.cli.error_report import exit_code_of
from llamaq.common.errors import InvalidSettings
from llamaq.producer import AsyncClient, JobFailed, LlamaqError
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.local.stop_signals import interrupt_on_sigterm, recorded_signals
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings, load_settings
from llamaq.worker_cli.demo_view import DemoJob, DemoView, stats_table

START_TIMEOUT_S = 120.0
"""Longest wait for the worker to load the model."""
POLL_S = 0.1
"""Interval at which the worker sends heartbeats, and at which the demo reads the last heartbeat."""
CANCEL_TIMEOUT_S = 2.0
"""Longest wait for the jobs to be cancelled when the demo is interrupted."""
FRAMES_PER_S = 15
LINE_CHARS = 72
"""Width of the printed text where the output is not a terminal."""
LOG_TAIL_CHARS = 2000
"""Number of characters from the end of the worker's log that are printed if the worker cannot start."""


def demo_jobs(count: int) -> list[DemoJob]:
    """Return `count` jobs. They use the prompts of the demo model, which are repeated if there are fewer prompts."""
    prompts = json.loads(files("llamaq.worker").joinpath("model", "demo_prompts.json").read_text())
    jobs = []
    for index in range(count):
        params = dict(prompts[index % len(prompts)])
        jobs.append(DemoJob(params.pop("title"), {**params, "temperature": 0.0}))
    return jobs


def run(count: int, model: str | None) -> int:
    """Run the demo. Before it returns, it ends all processes that it started, even after an interrupt.

    Args:
        count: The number of jobs.
        model: The path of a GGUF file. None: that of LLAMAQ_MODEL, or the demo model.

    Returns:
        The exit code.
    """
    replace_unencodable(sys.stdout)  # a person reads this output, also through a pipe
    console = Console(highlight=False)
    settings = load_settings(model=model, n_parallel=min(count, 8), heartbeat_s=POLL_S, max_queue=0)
    model_name = settings.model
    if model_name is None:
        model_name = "the small demo model of llamaq"
        # With this model, one thread is faster: two threads need longer to synchronize than a tick takes.
        settings = settings.model_copy(update={"n_threads": 1})
    console.print(f"{count} jobs, one worker with {settings.n_parallel} slots, {model_name}.", markup=False)
    view = DemoView(demo_jobs(count))
    with tempfile.TemporaryFile() as log_file:
        try:
            with interrupt_on_sigterm():
                _run_stack(console, settings, log_file, view)
        except KeyboardInterrupt:
            console.print("Interrupted; Redis and the worker have been stopped.")
            return 130
        except LlamaqError as exc:
            console.print(f"{type(exc).__name__}: {exc}", style="red", markup=False)
            log_file.seek(0)
            console.print(log_file.read().decode(errors="replace")[-LOG_TAIL_CHARS:], markup=False)
            return exit_code_of(exc)
    console.print(stats_table(view.jobs))
    console.print(f"{count} jobs together:{view.footer()}", markup=False)
    return 1 if any(job.has_failed for job in view.jobs) else 0


def _run_stack(console: Console, settings: WorkerSettings, log_file: BinaryIO, view: DemoView) -> None:
    """Start Redis and the worker, run the jobs, and stop both."""
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        supervisor = Supervisor(
            [settings.model_copy(update={"redis_url": redis.url})], log_file, also_check=redis.check
        )
        stack.callback(supervisor.stop)
        supervisor.start()
        signals = stack.enter_context(recorded_signals())
        check = partial(_check, supervisor, signals)
        asyncio.run(_run_jobs(console, AsyncClient(redis.url, settings.queue), check, view))


def _check(supervisor: Supervisor, signals: list[int]) -> None:
    """Restart a crashed worker or Redis.

    Raises:
        KeyboardInterrupt: A signal has arrived.
        InvalidSettings: The worker cannot start with its settings.
        EmbeddedRedisError: Redis cannot be restarted.
    """
    if signals:
        raise KeyboardInterrupt
    if supervisor.check() is not None:
        raise InvalidSettings("the worker cannot start; its log:")


async def _run_jobs(console: Console, client: AsyncClient, check: Callable[[], None], view: DemoView) -> None:
    """Wait for the worker, then submit the jobs and show them until all have ended."""
    async with client:
        with console.status("Loading the model …") if console.is_terminal else nullcontext():
            while view.worker is None:
                await _poll_worker(client, check, view)
                if view.elapsed_s > START_TIMEOUT_S:
                    raise LlamaqError(f"the worker is not ready after {START_TIMEOUT_S:g} s; its log:")
        view.started_s = time.monotonic()
        live = Live(view, console=console, refresh_per_second=FRAMES_PER_S, vertical_overflow="crop")
        with live if console.is_terminal else nullcontext():
            tasks = [asyncio.create_task(_run_job(console, client, job)) for job in view.jobs]
            try:
                while not all(task.done() for task in tasks):
                    await _poll_worker(client, check, view)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)
            for task in tasks:
                task.result()
            view.ended_s = time.monotonic()


async def _poll_worker(client: AsyncClient, check: Callable[[], None], view: DemoView) -> None:
    check()
    with suppress(RedisConnectionError):  # `check` restarts Redis when it has died
        view.worker = next(iter(await client.workers()), None)
    await asyncio.sleep(POLL_S)


async def _run_job(console: Console, client: AsyncClient, job: DemoJob) -> None:
    """Submit one job and add its chunks to the view."""
    try:
        submitted = await client.submit(**job.params)
        async for chunk in submitted.stream():
            job.text += chunk.text
            job.n_tokens += len(chunk.tokens)
            if not console.is_terminal:
                _print_lines(console, job)
        result = await submitted.result()
        job.stats, job.ending = result.stats, result.finish_reason.value
    except JobFailed as failed:
        job.ending = failed.code
        job.text += failed.message
    if not console.is_terminal:
        _print_lines(console, job)


def _print_lines(console: Console, job: DemoJob) -> None:
    """Print the complete lines of the job's new text, and the incomplete last line when the job has ended."""
    while pending := job.text[job.n_printed_chars :]:
        if len(pending) > LINE_CHARS:
            n_chars = max(0, pending.rfind(" ", 1, LINE_CHARS)) or LINE_CHARS
        elif job.ending:
            n_chars = len(pending)
        else:
            return
        job.n_printed_chars += n_chars
        line = " ".join(pending[:n_chars].split())
        console.print(f"{job.title:>20} | {line}", markup=False, soft_wrap=True)
