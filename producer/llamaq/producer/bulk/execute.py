"""Executes a bulk run from file to file, or continues it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack

from llamaq.producer.bulk.execution import CheckStop, Execution, OnProgress
from llamaq.producer.bulk.output_files import OutputFiles, open_output
from llamaq.producer.bulk.run_description import BulkProgress, BulkRun, BulkState
from llamaq.producer.client import AsyncClient


async def execute(
    run: BulkRun,
    client: AsyncClient,
    *,
    on_progress: OnProgress | None = None,
    stop: asyncio.Event | None = None,
    check_stop: CheckStop | None = None,
) -> BulkProgress:
    """Execute a run, or continue it, until all rows have an answer or an error.

    A full queue, a full Redis and a Redis that does not answer slow the run down: no row fails because of them.
    If this call is cancelled or the process dies, another call with the same run continues it. Jobs in flight are
    cancelled when the call ends early.

    Args:
        run: The description of the run.
        client: The client of the queue. Its `result_ttl_s` should be longer than an interruption of the run: rows whose
            result has expired are computed again.
        on_progress: Called in the event loop with the progress, about twice a second and at the end. It must not block.
        stop: When it is set, the run stops.
        check_stop: Called before the error of a cancelled row is written. It returns whether the run was stopped, and
            has set `stop` then. The row is not written. None: a cancelled row has failed.

    Returns:
        The progress at the end. `state` tells whether the run is complete, and otherwise why it ended.

    Raises:
        BulkRunRefused: There is no input, the output is of another run, the input or the parameters have changed since
            the run began, or another process executes it. Or the input was changed while the run read it.
        InvalidSettings: The workers of the queue have another number of partitions.
        RedisError: Redis cannot be reached at the start, or refuses the commands.
    """
    await client.redis.ping()  # a server that does not answer now is an error; a connection that is lost later is not
    stop, on_progress = stop or asyncio.Event(), on_progress or _ignore
    with ExitStack() as exits:
        files = await _open_files(exits, run, stop)
        if files is None:
            progress = BulkProgress(run_id=run.run_id, state=BulkState.STOPPED)
        else:
            execution = Execution(run, client, files, check_stop=check_stop)
            state = await execution.run_until_end(on_progress, stop)
            if state is BulkState.COMPLETED:
                await asyncio.to_thread(files.complete)
            progress = execution.progress(state)
        on_progress(progress)
        return progress


class _Stopped(Exception):
    """The run was stopped or cancelled while its input was read."""


async def _open_files(exits: ExitStack, run: BulkRun, stop: asyncio.Event) -> OutputFiles | None:
    """Open the output of the run, which may read the whole input. None: the run was stopped meanwhile.

    The read ends when the caller is cancelled. Otherwise the process would wait for its thread.
    """
    is_cancelled = threading.Event()

    def check() -> None:
        if stop.is_set() or is_cancelled.is_set():
            raise _Stopped

    try:
        return await asyncio.to_thread(exits.enter_context, open_output(run, check))
    except _Stopped:
        return None
    except asyncio.CancelledError:
        is_cancelled.set()
        raise


def drop_errors(run: BulkRun) -> int:
    """Delete the error file of a run, so that the next `execute` computes those rows again.

    Args:
        run: The description of the run.

    Returns:
        The number of rows in the file.

    Raises:
        BulkRunRefused: A process executes the run.
    """
    with open_output(run) as files:
        n_failed = files.n_failed
        run.error_file.unlink(missing_ok=True)
        return n_failed


def _ignore(_: BulkProgress) -> None:
    """Do nothing."""
