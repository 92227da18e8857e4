"""The commands that pause, drain and resume a queue."""

from __future__ import annotations

import typer

from llamaq.cli import views
from llamaq.cli.common_options import AsJson, Queue, RedisUrl
from llamaq.producer import Client


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (pause, drain, resume):
        app.command(command.__name__)(command)


def pause(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """Pause a queue: no waiting job starts until `llamaq resume`. Started jobs continue, and jobs are accepted."""
    with Client(redis_url, queue) as client:
        client.pause()
        _show_mode(client, as_json=as_json)


def drain(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """Drain a queue: no job is accepted until `llamaq resume`. The waiting and running jobs are finished."""
    with Client(redis_url, queue) as client:
        client.drain()
        _show_mode(client, as_json=as_json)


def resume(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """Resume a queue that was paused or drained."""
    with Client(redis_url, queue) as client:
        client.resume()
        _show_mode(client, as_json=as_json)


def _show_mode(client: Client, *, as_json: bool) -> None:
    """Print the depth of the queue, which contains its mode."""
    depth = client.queue_depth()
    if as_json:
        views.show_json(depth)
    else:
        typer.echo(f"queue {client.queue}: {views.depth_line(depth)}")
