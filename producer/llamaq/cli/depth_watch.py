"""Prints the depth of a queue again and again, with its change per second: `llamaq depth --watch`."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator

import typer
from redis.exceptions import RedisError

from llamaq.cli import views
from llamaq.cli.error_report import explain
from llamaq.producer import Client, QueueDepth


def watch(client: Client, interval_s: float, *, as_json: bool, n_lines: int | None = None) -> None:
    """Print a line for each reading of the depth, until Ctrl-C.

    If Redis fails after the first line, a notice is printed, and the next reading follows.

    Args:
        client: The client of the queue.
        interval_s: Seconds between two readings.
        as_json: Whether to print one JSON object in each line.
        n_lines: Number of readings. None: until Ctrl-C.

    Raises:
        RedisError: The first reading failed.
    """
    before: tuple[QueueDepth, float] | None = None
    for _ in _ticks(interval_s, n_lines):
        try:
            depth, now_s = client.queue_depth(), time.time()
        except RedisError as exc:
            if before is None:
                raise
            views.notice(explain(exc))
            continue
        changes = (None, None) if before is None else changes_per_s(before[0], depth, now_s - before[1])
        typer.echo(json_line(depth, changes, now_s) if as_json else text_line(depth, changes, now_s))
        before = depth, now_s


def _ticks(interval_s: float, n_lines: int | None) -> Iterator[None]:
    """Yield at once, and then every `interval_s` seconds."""
    next_s = time.monotonic()
    for _ in itertools.count() if n_lines is None else range(n_lines):
        time.sleep(max(0.0, next_s - time.monotonic()))
        next_s = max(next_s, time.monotonic() - interval_s) + interval_s
        yield


def changes_per_s(before: QueueDepth, after: QueueDepth, seconds: float) -> tuple[float | None, float | None]:
    """Return the changes of the numbers of waiting and of running jobs per second. None: no time has passed."""
    if seconds <= 0:
        return None, None
    return (after.waiting - before.waiting) / seconds, (after.running - before.running) / seconds


def text_line(depth: QueueDepth, changes: tuple[float | None, float | None], now_s: float) -> str:
    """Return the time of day, the depth and its changes as text."""
    clock = time.strftime("%H:%M:%S", time.localtime(now_s))
    waiting, running = ("-" if change is None else f"{change:+.1f}/s" for change in changes)
    return f"{clock}  {views.depth_line(depth)}  (waiting {waiting}, running {running})"


def json_line(depth: QueueDepth, changes: tuple[float | None, float | None], now_s: float) -> str:
    """Return the fields of the depth, the time in milliseconds since the epoch and the changes as one JSON object."""
    waiting, running = changes
    fields = {"time_ms": int(now_s * 1000), **depth.model_dump(mode="json")}
    return json.dumps(fields | {"waiting_per_s": waiting, "running_per_s": running})
