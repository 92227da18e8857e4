"""The commands for a queue: `depth`, `workers`, `stats` and `health`."""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated

import typer

from llamaq.cli import views
from llamaq.cli.common_options import AsJson, Queue, RedisUrl
from llamaq.common.errors import LlamaqError, NoWorker
from llamaq.common.redis.server_time import server_time_ms
from llamaq.producer import AsyncClient, Client, Worker

Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", help="Name of the queue; may be given several times. (default default; LLAMAQ_QUEUE)"),
]
MaxAge = Annotated[float, typer.Option(help="Largest age of the worker's last tick, in seconds.")]
AnyHost = Annotated[bool, typer.Option("--any", help="Accept a worker on any host.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (depth, workers, stats, health):
        app.command(command.__name__)(command)


def depth(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """Show how many jobs wait and how many run."""
    with Client(redis_url, queue) as client:
        found = client.queue_depth()
        if as_json:
            views.show_json(found)
        else:
            typer.echo(f"{found.waiting} waiting, {found.running} running")


def workers(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """List the live workers of a queue. With --json, print one object per worker."""
    with Client(redis_url, queue) as client:
        found = client.workers()
        if not as_json:
            views.show_workers(found)
            return
        for worker in found:
            views.show_json(worker)


def stats(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """Show the depth of a queue, its workers, and the stats of its last jobs."""
    with Client(redis_url, queue) as client:
        found = client.stats()
        if as_json:
            views.show_json(found)
        else:
            views.show_stats(found)


def health(
    redis_url: RedisUrl = None, queue: Queues = None, max_age_s: MaxAge = 30.0, any_host: AnyHost = False
) -> None:
    """Check that every queue has a worker on this host with a recent tick. The exit code is 0 if so, otherwise 1."""
    host = None if any_host else socket.gethostname()
    names: list[str | None] = [*queue] if queue else [None]
    for name in names:
        worker, age_s = asyncio.run(freshest_worker(redis_url, name, host))
        if age_s > max_age_s:
            raise LlamaqError(
                f"the last tick of {worker.card.worker} is {age_s:.1f} s old, more than --max-age-s {max_age_s:g}"
            )
        typer.echo(f"ok: {worker.card.worker} serves {worker.card.queue}")


async def freshest_worker(redis_url: str | None, queue: str | None, host: str | None) -> tuple[Worker, float]:
    """Return the worker with the most recent tick, and the age of that tick in seconds.

    The engine of an idle worker wakes up every second, which counts as a tick.

    Args:
        redis_url: The Redis URL. None: the setting.
        queue: The name of the queue. None: the setting.
        host: Only workers on this host count. None: all workers.

    Raises:
        NoWorker: No worker on `host` serves the queue.
    """
    async with AsyncClient(redis_url, queue) as client:
        now_ms = await server_time_ms(client.redis)
        ages_s = [
            (worker, (now_ms - worker.heartbeat_ms + worker.tick_age_ms) / 1000)
            for worker in await client.workers()
            if host in (None, worker.card.host)
        ]
        if not ages_s:
            raise NoWorker(client.queue, host)
        return min(ages_s, key=lambda pair: pair[1])
