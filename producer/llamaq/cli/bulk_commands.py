"""`llamaq bulk`: computes all rows of a file."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Annotated

import typer

from llamaq.cli import rq_bulk_commands, views
from llamaq.cli.bulk_progress import show_progress
from llamaq.cli.bulk_run_options import with_run_options
from llamaq.cli.common_options import AsJson, Queue, RedisUrl, RequireWorker
from llamaq.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from llamaq.common.errors import NoWorker
from llamaq.producer import AsyncClient
from llamaq.producer.bulk import BulkProgress, BulkRun, BulkState, drop_errors, execute
from llamaq.producer.streaming import pubsub_connection

FORCE_AFTER_S = 2.0
"""Signals within this time after the first one are ignored: the run cancels its jobs first, even if Ctrl-C is pressed
twice."""
_REASONS = {
    BulkState.STOPPED: "the run was stopped: start the same command again to continue it",
    BulkState.DEADLINE: "the run reached its deadline: start the same command with a later --deadline to continue it",
    BulkState.TOO_MANY_ERRORS: "more rows than --max-errors have failed: start the same command again to continue",
}
"""For each state in which a run is not complete: the notice."""


def build_app() -> typer.Typer:
    """Return the group of commands."""
    app = typer.Typer(help="Compute all rows of a file.", no_args_is_help=True)
    app.command("run")(with_run_options(run_here))
    rq_bulk_commands.register(app)
    return app


def run_here(
    redis_url: RedisUrl = None,
    queue: Queue = None,
    require_worker: RequireWorker = None,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Compute again the rows that failed in an earlier call.")
    ] = False,
    as_json: AsJson = False,
    *,
    run: BulkRun,
) -> None:
    """Compute all rows of a file and write the answers to another file, with a progress bar.

    A row of a JSONL file is a line of OpenAI's Batch API, or an object with `prompt`, `tokens` or `messages`, perhaps
    an `id`, and job options. After an interruption, start the same command again: it continues, and computes no row
    twice. If a row has failed, the exit code is 1.
    """
    # In an outage of Redis, the polls of the jobs log a warning. The pub/sub connection would log the same again.
    pubsub_connection.log.setLevel(logging.ERROR)
    client = AsyncClient(redis_url, queue, require_worker=require_worker)
    progress = asyncio.run(_execute(run, client, retry_errors=retry_errors))
    if as_json:
        views.show_json(progress)
    if progress.rows_failed:
        views.notice(f"{progress.failure}: {run.error_file}")
    if progress.state in _REASONS:
        views.notice(_REASONS[progress.state])
    if progress.state is BulkState.STOPPED:
        raise typer.Exit(EXIT_INTERRUPTED)
    if progress.state is not BulkState.COMPLETED or progress.rows_failed:
        raise typer.Exit(EXIT_FAILED)


async def _execute(run: BulkRun, client: AsyncClient, *, retry_errors: bool) -> BulkProgress:
    """Execute the run. The first SIGINT or SIGTERM stops it, a later one ends the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        stop.set()
        loop.call_later(FORCE_AFTER_S, loop.remove_signal_handler, number)

    async with client:
        if not await client.workers():
            missing = NoWorker(client.queue)
            if client.settings.require_worker:
                raise missing
            views.notice(f"{missing} (the run waits for a worker; `llamaq queues` lists all queues)")
        if retry_errors:
            drop_errors(run)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        with show_progress(run.output.name) as on_progress:
            return await execute(run, client, on_progress=on_progress, stop=stop)
