"""The commands for bulk runs of RQ workers: `llamaq bulk submit`, `worker`, `list`, `status`, `wait`, `cancel` and
`retry-errors`.

RQ is an optional dependency, so each command imports `llamaq.producer.rq` when it is called.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from llamaq.cli import views
from llamaq.cli.columns import show_fields, show_rows
from llamaq.cli.common_options import AsJson, OfLogFormat, Queue, RedisUrl
from llamaq.cli.exit_codes import EXIT_FAILED, EXIT_NO_ANSWER
from llamaq.common.errors import InvalidRequest
from llamaq.common.logging_setup import LogFormat, configure_logging

if TYPE_CHECKING:
    from llamaq.producer.bulk import BulkRun
    from llamaq.producer.rq import BulkQueue, RunStatus

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
At = Annotated[str | None, typer.Option("--at", metavar="TIME", help="Begin at this time, such as 2026-12-01T22:00Z.")]
In = Annotated[str | None, typer.Option("--in", metavar="DELAY", help="Begin after this time, such as 90s, 30m, 8h.")]
Retries = Annotated[int, typer.Option(min=0, max=1000, help="How often RQ tries the run again after an error.")]
OnSuccess = Annotated[
    str | None, typer.Option(metavar="MODULE.FUNCTION", help="Function that the RQ worker calls after the run.")
]
OnFailure = Annotated[
    str | None, typer.Option(metavar="MODULE.FUNCTION", help="Function that the RQ worker calls after each error.")
]
Timeout = Annotated[float | None, typer.Option("--wait-s", min=0, help="Longest wait in seconds. (default: no limit)")]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def register(app: typer.Typer) -> None:
    """Add the commands to the group `llamaq bulk`."""
    app.command("worker")(run_worker)
    app.command("list")(list_runs)
    app.command("status")(status)
    app.command("wait")(wait)
    app.command("cancel")(cancel)
    app.command("retry-errors")(retry_errors)


def submit_run(
    run: BulkRun,
    queue: str | None,
    *,
    rq: BulkQueue,
    after: list[str] | None,
    at: str | None,
    delay: str | None,
    retries: int,
    on_success: str | None,
    on_failure: str | None,
) -> RunStatus:
    """Hand a run to the RQ workers."""
    return rq.submit(
        run,
        queue=queue,
        after=after or (),
        at=read_time(at, delay, datetime.now(UTC)),
        retries=retries,
        on_success=on_success,
        on_failure=on_failure,
    )


def run_worker(
    rq_url: RqUrl = None,
    rq_queue: RqQueue = None,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    burst: Annotated[bool, typer.Option("--burst", help="End when no run waits.")] = False,
    log_format: OfLogFormat = LogFormat.TEXT,
) -> None:
    """Execute submitted runs, one after the other. SIGTERM puts the running one back into the RQ queue.

    It also works as an RQ worker for other jobs of the queue, such as `llamaq.producer.rq.generate`.
    """
    from llamaq.producer.rq import BulkQueue
    from llamaq.producer.rq.bulk_worker import BulkWorker, serve

    configure_logging("info", log_format)
    with BulkQueue(rq_url, rq_queue, redis_url=redis_url) as runs:
        runs.redis.ping()  # an unreachable Redis is an error now, a lost connection later is not
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
        for run in found:
            views.show_json(run)
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
    """Wait until a run has ended. If the run is not complete then, the exit code is 1."""
    from llamaq.producer.rq import BulkQueue, RunState

    last = None
    with BulkQueue(rq_url, rq_queue, redis_url=redis_url) as runs, Console(stderr=True).status("") as line:
        try:
            for last in runs.watch(run_id, timeout=wait_s):
                line.update(progress_line(last))
        except TimeoutError as exc:
            views.notice(str(exc))
            raise typer.Exit(EXIT_NO_ANSWER) from exc
    if last is not None:
        _show(last, as_json=as_json)
        if last.state is not RunState.COMPLETED:
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


def read_time(at: str | None, delay: str | None, now: datetime) -> datetime | None:
    """Return the time that `--at` or `--in` names. None: neither is given.

    Raises:
        InvalidRequest: Both are given, or one is not valid.
    """
    if at is not None and delay is not None:
        raise InvalidRequest("--at and --in cannot both be given")
    if delay is not None:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", delay.strip())
        if found is None:
            raise InvalidRequest(f"--in: {delay[:40]!r} is not a time such as 90s, 30m, 8h or 2d")
        return now + timedelta(seconds=float(found[1]) * _UNITS[found[2]])
    if at is None:
        return None
    try:
        time = datetime.fromisoformat(at)
    except ValueError as exc:
        raise InvalidRequest(f"--at: {at[:40]!r} is not a time such as 2026-12-01T22:00Z") from exc
    return time if time.tzinfo else time.astimezone()


def progress_line(run: RunStatus) -> str:
    """Return the state and the progress of a run in one line."""
    parts = [f"{run.run_id}: {run.state.value}"]
    progress = run.progress
    if progress is not None:
        rows, failed = _numbers(run)
        parts += [f"{rows} rows", f"{failed} failed", f"{progress.tokens_per_s:.0f} tokens/s"]
        parts.append(f"{progress.cached_share:.0%} of the prompts cached")
        if progress.eta_s is not None:
            parts.append(f"{views.format_age(progress.eta_s)} left")
        parts += [progress.notice] if progress.notice else []
    return ", ".join(parts) + ("" if run.error is None else f": {run.error}")


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
