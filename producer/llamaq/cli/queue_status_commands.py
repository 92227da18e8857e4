"""The commands for queues: `queues`, `jobs`, `purge`, `depth`, `workers`, `stats` and `health`."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Annotated, Any

import typer

from llamaq.cli import views
from llamaq.cli.common_options import (
    MAX_INTERVAL_S,
    AsJson,
    OfPriority,
    OfTenant,
    OlderThan,
    Queue,
    RedisUrl,
    WithMetadata,
    Yes,
    read_metadata,
)
from llamaq.cli.depth_watch import watch
from llamaq.cli.exit_codes import EXIT_FAILED, EXIT_NO_ANSWER
from llamaq.common.errors import LlamaqError, NoWorker
from llamaq.common.redis.server_state import server_time_ms
from llamaq.producer import AsyncClient, Client, JobState, Worker
from llamaq.producer.queries.queue_snapshots import read_workers

Queues = Annotated[
    list[str] | None,
    typer.Option(
        "--queue",
        help="Name of the queue; may be given several times. (default: all of workers on this host; LLAMAQ_QUEUE)",
    ),
]
MaxAge = Annotated[float, typer.Option(min=0, help="Largest age of the worker's last tick, in seconds.")]
AnyHost = Annotated[bool, typer.Option("--any", help="Accept a worker on any host.")]
AllQueues = Annotated[bool, typer.Option("--all", help="Also show queues that have neither a job nor a worker.")]
Limit = Annotated[int, typer.Option(min=1, help="Largest number of jobs.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (queues, jobs, purge, depth, workers, stats, health):
        app.command(command.__name__)(command)


def queues(redis_url: RedisUrl = None, all_queues: AllQueues = False, as_json: AsJson = False) -> None:
    """List all queues with their jobs and workers. With --json, print one object per queue."""
    with Client(redis_url) as client:
        found = [
            queue
            for queue in client.queues()
            if all_queues or queue.waiting or queue.running or queue.delayed or queue.workers
        ]
        if as_json:
            views.show_json(*found)
        else:
            views.show_queues(found)


def jobs(
    redis_url: RedisUrl = None,
    queue: Queue = None,
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state: `queued` or `running`.")] = None,
    priority: OfPriority = None,
    older_than_s: OlderThan = None,
    metadata: WithMetadata = None,
    tenant: OfTenant = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List the waiting and running jobs of a queue, oldest first. With --json, print one object per job."""
    with Client(redis_url, queue) as client:
        found = client.jobs(
            state=state,
            priority=priority,
            older_than_s=older_than_s,
            metadata=read_metadata(metadata),
            tenant=tenant,
            limit=limit,
        )
        if as_json:
            views.show_json(*found)
        else:
            is_filtered = any((state, priority, older_than_s, metadata, tenant))
            missing = f"queue {client.queue!r} has no waiting or running job{' that matches' if is_filtered else ''}"
            views.show_jobs(found, missing)


def purge(
    redis_url: RedisUrl = None,
    queue: Queue = None,
    priority: OfPriority = None,
    older_than_s: OlderThan = None,
    metadata: WithMetadata = None,
    tenant: OfTenant = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Cancel nothing, only count the jobs.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Cancel the waiting jobs of a queue. Running jobs continue. With --json, print the ids of the jobs."""
    wanted = read_metadata(metadata)
    with Client(redis_url, queue) as client:
        counted_s = time.monotonic()
        age_s = older_than_s or 0.0
        if not dry_run and not yes:
            count = len(
                client.purge(priority=priority, older_than_s=age_s, metadata=wanted, tenant=tenant, dry_run=True)
            )
            if count and not typer.confirm(f"Cancel {_count(count)} of queue {client.queue!r}?", err=True):
                raise typer.Exit(EXIT_FAILED)
            age_s += time.monotonic() - counted_s  # jobs that were submitted after the count are left alone
        purged = client.purge(priority=priority, older_than_s=age_s, metadata=wanted, tenant=tenant, dry_run=dry_run)
        if as_json:
            views.show_json_fields(queue=client.queue, jobs=purged, dry_run=dry_run)
        else:
            typer.echo(f"{_count(len(purged))} would be cancelled" if dry_run else f"cancelled {_count(len(purged))}")


def _count(n_jobs: int) -> str:
    return f"{n_jobs} waiting job{'' if n_jobs == 1 else 's'}"


def depth(
    redis_url: RedisUrl = None,
    queue: Queue = None,
    repeated: Annotated[bool, typer.Option("--watch", help="Print a line again and again, until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=MAX_INTERVAL_S, help="With --watch: seconds between lines.")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show how many jobs wait and how many run. With --watch, also how these numbers change per second."""
    with Client(redis_url, queue) as client:
        if repeated:
            watch(client, interval_s, as_json=as_json)
            return
        found = client.queue_depth()
        if as_json:
            views.show_json(found)
        else:
            typer.echo(views.depth_line(found))


def workers(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """List the live workers of a queue. With --json, print one object per worker."""
    with Client(redis_url, queue) as client:
        found = client.workers()
        if as_json:
            views.show_json(*found)
        else:
            views.show_workers(found, client.queue)


def stats(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """Show the depth of a queue, its workers, and the stats of its last jobs."""
    with Client(redis_url, queue) as client:
        found = client.stats()
        if as_json:
            views.show_json(found)
        else:
            views.show_stats(found)


def health(
    redis_url: RedisUrl = None,
    queue: Queues = None,
    max_age_s: MaxAge = 30.0,
    any_host: AnyHost = False,
    as_json: AsJson = False,
) -> None:
    """Check that every queue has a worker on this host with a recent tick. If so, the exit code is 0.

    Without a name, these are the queues that workers on this host serve. There must be one.
    """
    host = None if any_host else socket.gethostname()
    names = queue or asyncio.run(queues_to_check(redis_url, host))
    if not names:
        views.notice(f"no worker on this host ({host}) serves any queue; start one with: llamaq worker")
        raise typer.Exit(EXIT_NO_ANSWER)
    for name in names:
        worker, age_s = asyncio.run(freshest_worker(redis_url, name, host))
        card = worker.card
        if age_s > max_age_s:
            raise LlamaqError(
                f"the last tick of {card.worker} is {age_s:.1f} s old, more than --max-age-s {max_age_s:g}"
            )
        if as_json:
            views.show_json_fields(queue=card.queue, worker=card.worker, tick_age_s=age_s)
        else:
            typer.echo(f"ok: {card.worker} serves {card.queue}")


async def queues_to_check(redis_url: str | None, host: str | None) -> list[str]:
    """Return the queue of the setting, if it is set or `host` is None, or else all queues of the workers on `host`."""
    async with AsyncClient(redis_url) as client:
        if host is None or "queue" in client.settings.model_fields_set:
            return [client.queue]
        served: Any = await client.redis.zrange(client.keys.queues(), 0, -1)
        found = []
        for name in [name.decode(errors="replace") for name in served]:
            workers = await read_workers(client.connection, name)
            if host in [worker.card.host for worker in workers]:
                found.append(name)
        return found


async def freshest_worker(redis_url: str | None, queue: str, host: str | None) -> tuple[Worker, float]:
    """Return the worker with the most recent tick, and the age of that tick in seconds.

    The engine of an idle worker wakes up every second, which counts as a tick.

    Args:
        redis_url: The Redis URL. None: the setting.
        queue: The name of the queue.
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
