"""The commands for bulk runs of RQ workers: `llamaq bulk submit`, `worker`, `list`, `status`, `wait`, `cancel` and
`retry-errors`.

RQ is an optional dependency, so each command imports `llamaq.producer.rq` when it is called.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from llamaq.cli import views
from llamaq.cli.bulk_progress import show_progress
from llamaq.cli.bulk_run_options import read_time, with_run_options
from llamaq.cli.columns import show_fields, show_rows
from llamaq.cli.common_options import AsJson, OfLogFormat, Queue, RedisUrl
from llamaq.cli.exit_codes import EXIT_FAILED, EXIT_NO_ANSWER
from llamaq.common.logging_setup import LogFormat, configure_logging
from llamaq.producer.bulk import BulkRun

if TYPE_CHECKING:
    from llamaq.producer.rq import RunStatus

RqUrl = Annotated[
    str | None, typer.Option(help="URL of RQ's Redis, a single server. (default: --redis-url; LLAMAQ_RQ_URL)")
]
RqQueue = Annotated[
    str | None, typer.Option(help="Name of the RQ queue with the runs. (default llamaq-bulk; LLAMAQ_RQ_QUEUE)")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The id of the run, as printed by `submit`.")]
After = Annotated[
    list[str] | None, typer.Option("--after", metavar="RUN", help="Begin after this run is complete. May be repeated.")
]
At = Annotated[
    str | None,
    typer.Option(
        "--at", metavar="TIME", help="Begin at this time, such as 2030-12-24T18:00+01:00, or after 90s, 30m, 8h, 2d."
    ),
]
RunRetries = Annotated[int, typer.Option(min=0, max=1000, help="How often RQ tries the run again after an error.")]
OnSuccess = Annotated[
    str | None, typer.Option(metavar="MODULE.FUNCTION", help="Function that the RQ worker calls after the run.")
]
OnFailure = Annotated[
    str | None, typer.Option(metavar="MODULE.FUNCTION", help="Function that the RQ worker calls after each error.")
]
Timeout = Annotated[float | None, typer.Option("--wait-s", min=0, help="Longest wait in seconds. (default: no limit)")]


def register(app: typer.Typer) -> None:
    """Add the commands to the group `llamaq bulk`."""
    app.command("submit")(with_run_options(submit))
    app.command("worker")(run_worker)
    app.command("list")(list_runs)
    app.command("status")(status)
    app.command("wait")(wait)
    app.command("cancel")(cancel)
    app.command("retry-errors")(retry_errors)


def submit(
    redis_url: RedisUrl = None,
    queue: Queue = None,
    rq_url: RqUrl = None,
    rq_queue: RqQueue = None,
    after: After = None,
    at: At = None,
    run_retries: RunRetries = 20,
    on_success: OnSuccess = None,
    on_failure: OnFailure = None,
    as_json: AsJson = False,
    *,
    run: BulkRun,
) -> None:
    """Pass a run to an RQ worker (`llamaq bulk worker`) and print the id of the run.

    The RQ worker opens the files, so it needs the same folders as this command. To continue a run that has failed or
    was cancelled, submit it again with the same files.
    """
    from llamaq.producer.rq import BulkQueue

    time = None if at is None else read_time(at, datetime.now(UTC))
    with BulkQueue(rq_url, rq_queue, redis_url=redis_url) as runs:
        submitted = runs.submit(
            run,
            queue=queue,
            after=after or (),
            at=time,
            retries=run_retries,
            on_success=on_success,
            on_failure=on_failure,
        )
        if not run.input.exists():
            views.notice(f"{run.input} is not on this machine: the RQ worker must find it there")
        if not runs.n_workers():
            name = runs.settings.rq_queue
            views.notice(f"no RQ worker serves RQ queue {name!r}; start one with: llamaq bulk worker")
    if as_json:
        views.show_json(submitted)
    else:
        typer.echo(submitted.run_id)


def run_worker(
    rq_url: RqUrl = None,
    rq_queue: RqQueue = None,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    burst: Annotated[bool, typer.Option("--burst", help="End when no run waits.")] = False,
    log_format: OfLogFormat = LogFormat.TEXT,
) -> None:
    """Execute submitted runs, one after the other. SIGTERM puts the current run back into the RQ queue.

    While Redis does not answer, it waits.

    It also works as an RQ worker for other jobs of the queue, such as `llamaq.producer.rq.generate`.
    """
    from llamaq.producer.rq import BulkQueue
    from llamaq.producer.rq.bulk_run_worker import BulkWorker, serve

    configure_logging("info", log_format)
    with BulkQueue(rq_url, rq_queue, redis_url=redis_url) as runs:
        for name, value in (("LLAMAQ_REDIS_URL", redis_url), ("LLAMAQ_QUEUE", queue)):
            if value is not None:  # the functions of RQ jobs read their settings from the environment
                os.environ[name] = value
        serve(lambda: BulkWorker(runs.settings.rq_queue, runs.redis), burst=burst)


def list_runs(
    rq_url: RqUrl = None, rq_queue: RqQueue = None, redis_url: RedisUrl = None, as_json: AsJson = False
) -> None:
    """List the submitted runs, newest first. With --json, print one object per run."""
    from llamaq.producer.rq import BulkQueue

    with BulkQueue(rq_url, rq_queue, redis_url=redis_url) as runs:
        found = runs.runs()
        name = runs.settings.rq_queue
    if as_json:
        views.show_json(*found)
        return
    rows = [(run.run_id, run.state.value, *_numbers(run), str(run.output)) for run in found]
    show_rows(("run", "state", "rows", "failed", "output"), rows, missing=f"RQ queue {name!r} has no bulk run")


def status(
    run_id: RunArgument,
    rq_url: RqUrl = None,
    rq_queue: RqQueue = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the state and the progress of a run."""
    from llamaq.producer.rq import BulkQueue

    with BulkQueue(rq_url, rq_queue, redis_url=redis_url) as runs:
        _show(runs.status(run_id), as_json=as_json)


def wait(
    run_id: RunArgument,
    rq_url: RqUrl = None,
    rq_queue: RqQueue = None,
    redis_url: RedisUrl = None,
    wait_s: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Wait until a run has ended. If it is not complete then, or a row has failed, the exit code is 1."""
    from llamaq.producer.rq import BulkQueue, RunState

    last = None
    with BulkQueue(rq_url, rq_queue, redis_url=redis_url) as runs, show_progress(run_id) as show:
        try:
            for run in runs.watch(run_id, timeout=wait_s):
                if last is None or run.state is not last.state:
                    views.notice(f"{run_id}: {run.state.value}" + (f" ({run.error})" if run.error else ""))
                if run.progress is not None and run.state is RunState.RUNNING:
                    show(run.progress)
                last = run
        except TimeoutError as exc:
            views.notice(str(exc))
            raise typer.Exit(EXIT_NO_ANSWER) from exc
    if last is not None:
        _show(last, as_json=as_json)
        has_failures = last.progress is not None and last.progress.rows_failed > 0
        if last.progress is not None and has_failures:
            views.notice(f"{last.progress.failure}: {last.errors}")
        if has_failures or last.state is not RunState.COMPLETED:
            raise typer.Exit(EXIT_FAILED)


def cancel(
    run_id: RunArgument,
    rq_url: RqUrl = None,
    rq_queue: RqQueue = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Stop a run. Its output keeps the rows that are done. Submit the run again to continue it."""
    from llamaq.producer.rq import BulkQueue

    with BulkQueue(rq_url, rq_queue, redis_url=redis_url) as runs:
        _show_state(runs.cancel(run_id), as_json=as_json)


def retry_errors(
    run_id: RunArgument,
    rq_url: RqUrl = None,
    rq_queue: RqQueue = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Compute the failed rows of an ended run again. Their answers are added to the output of the run."""
    from llamaq.producer.rq import BulkQueue

    with BulkQueue(rq_url, rq_queue, redis_url=redis_url) as runs:
        _show_state(runs.retry_errors(run_id), as_json=as_json)


def _numbers(run: RunStatus) -> tuple[str, str]:
    progress = run.progress
    if progress is None:
        return views.NO_VALUE, views.NO_VALUE
    total = "?" if progress.rows_total is None else progress.rows_total
    return f"{progress.rows_done}/{total}", str(progress.rows_failed)


def _show_state(run: RunStatus, *, as_json: bool) -> None:
    if as_json:
        views.show_json(run)
    else:
        typer.echo(f"{run.run_id}: {run.state.value}")


def _show(run: RunStatus, *, as_json: bool) -> None:
    if as_json:
        views.show_json(run)
        return
    values = run.model_dump(mode="json", exclude_none=True, exclude={"progress"})
    if run.progress is not None:
        values |= run.progress.model_dump(mode="json", exclude_none=True, exclude={"run_id", "state"})
        values["cached_share"] = f"{run.progress.cached_share:.0%}"
    show_fields([(name, str(value)) for name, value in values.items()])
