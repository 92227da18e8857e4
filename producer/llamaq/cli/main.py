"""The `llamaq` command. Errors are one line on stderr and exit code 1.

The commands of the GPU host (`worker`, `up`, `demo`) are in `llamaq.cli.worker_commands`. That module needs
`llamaq[worker]`, so it is imported only when one of them is called.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError

from llamaq.cli import dead, slots, views
from llamaq.cli.job_options import AsJson, Queue, RedisUrl, with_job_options
from llamaq.common.errors import LlamaqError, MissingExtra, NoWorker
from llamaq.common.protocol.queue_state import Worker
from llamaq.common.redis.server_time import server_time_ms
from llamaq.producer.client import AsyncClient
from llamaq.producer.sync import Client

WORKER_COMMANDS = {
    "worker": "Serve a queue: run its jobs on this machine.",
    "up": "The whole stack on this machine: Redis, unless one is named, and workers.",
    "demo": "Eight jobs streaming side by side through one llama.cpp batch.",
}

Wait = Annotated[
    float | None, typer.Option("--wait-s", help="how long to wait, in seconds [env: LLAMAQ_TIMEOUT_S] [default: 300]")
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB_ID")]
MaxAge = Annotated[float, typer.Option(help="how long ago the last tick may be, in seconds")]
AnyHost = Annotated[bool, typer.Option("--any", help="a worker on any host will do")]
Queues = Annotated[list[str] | None, typer.Option("--queue", help="may be given several times [env: LLAMAQ_QUEUE]")]


def generate(
    prompt: Annotated[str, typer.Argument(help="the text to go on from; - reads it from stdin")],
    redis_url: RedisUrl = None,
    queue: Queue = None,
    wait_s: Wait = None,
    as_json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Go on with a text, and print it as it comes; with --json the result when it is complete."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        if as_json:
            views.show_json(client.generate(text, **options))
        else:
            views.show_stream(client.stream(text, **options))


def chat(
    message: Annotated[str | None, typer.Argument(help="what to say; - reads it from stdin; nothing: a talk")] = None,
    system: Annotated[str | None, typer.Option(help="a system message to begin with")] = None,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    wait_s: Wait = None,
    as_json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Ask a chat model; without a MESSAGE on a terminal, talk to it until Ctrl-D."""
    messages = [{"role": "system", "content": system}] if system else []
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        if message is None and sys.stdin.isatty():
            talk(client, messages, options)
            return
        content = sys.stdin.read() if message in (None, "-") else message
        messages.append({"role": "user", "content": content or ""})
        if as_json:
            views.show_json(client.chat(messages, **options))
        else:
            views.show_stream(client.stream_chat(messages, **options))


def talk(client: Client, messages: list[dict[str, str]], options: dict[str, Any]) -> None:
    """Ask and answer in turn, with all that was said before; Ctrl-D ends it."""
    while True:
        try:
            said = typer.prompt(">", prompt_suffix=" ")
        except typer.Abort:
            typer.echo()
            return
        messages.append({"role": "user", "content": said})
        answer = views.show_stream(client.stream_chat(messages, **options))
        messages.append({"role": "assistant", "content": answer})


def submit(
    prompt: Annotated[str, typer.Argument(help="the text to go on from; - reads it from stdin")],
    redis_url: RedisUrl = None,
    queue: Queue = None,
    *,
    options: dict[str, Any],
) -> None:
    """Put a job into the queue and print its id."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with Client(redis_url, queue) as client:
        typer.echo(client.submit(text, **options).id)


def stream(job_id: JobArgument, redis_url: RedisUrl = None, wait_s: Wait = None, as_json: AsJson = False) -> None:
    """Print a job's text from its beginning, as it comes; with --json one object for each piece."""
    with Client(redis_url, timeout_s=wait_s) as client:
        views.show_stream(client.job(job_id).stream(), as_json=as_json)


def result(job_id: JobArgument, redis_url: RedisUrl = None, wait_s: Wait = None, as_json: AsJson = False) -> None:
    """Wait for a job's end and print its text, or all of its result with --json."""
    with Client(redis_url, timeout_s=wait_s) as client:
        found = client.job(job_id).result()
        if as_json:
            views.show_json(found)
        else:
            typer.echo(found.text)


def cancel(job_id: JobArgument, redis_url: RedisUrl = None) -> None:
    """Cancel a job."""
    with Client(redis_url) as client:
        typer.echo("cancelled" if client.cancel(job_id) else "it had ended already")


def status(job_id: JobArgument, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Show where a job is."""
    with Client(redis_url) as client:
        found = client.job(job_id).status()
        if as_json:
            views.show_json(found)
        else:
            views.show_status(found)


def depth(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """How many jobs wait, and how many run."""
    with Client(redis_url, queue) as client:
        found = client.queue_depth()
        if as_json:
            views.show_json(found)
        else:
            typer.echo(f"{found.waiting} waiting, {found.running} running")


def workers(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """The live workers of a queue; with --json one object for each."""
    with Client(redis_url, queue) as client:
        found = client.workers()
        if not as_json:
            views.show_workers(found)
            return
        for worker in found:
            views.show_json(worker)


def stats(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """A queue at one glance: depth, workers, last jobs."""
    with Client(redis_url, queue) as client:
        found = client.stats()
        if as_json:
            views.show_json(found)
        else:
            views.show_stats(found)


def health(
    redis_url: RedisUrl = None, queue: Queues = None, max_age_s: MaxAge = 30.0, any_host: AnyHost = False
) -> None:
    """Exit code 0 when Redis answers and a worker on this host has ticked lately, for each queue, else 1."""
    names: list[str | None] = [*queue] if queue else [None]
    for name in names:
        worker, age_s = asyncio.run(freshest_worker(redis_url, name, None if any_host else socket.gethostname()))
        if age_s > max_age_s:
            raise LlamaqError(f"{worker.card.worker} ticked last {age_s:.1f} s ago (--max-age-s {max_age_s:g})")
        typer.echo(f"ok: {worker.card.worker} serves {worker.card.queue}")


async def freshest_worker(redis_url: str | None, queue: str | None, host: str | None) -> tuple[Worker, float]:
    """The worker of a queue, and of this host unless that is None, that ticked last, and how many seconds ago it did.

    Raises `NoWorker`. An idle worker's engine counts as ticking: it wakes up every second.
    """
    async with AsyncClient(redis_url, queue) as client:
        now_ms = await server_time_ms(client.redis)
        ages = [
            (worker, (now_ms - worker.heartbeat_ms + worker.tick_age_ms) / 1000)
            for worker in await client.workers()
            if host in (None, worker.card.host)
        ]
        if not ages:
            raise NoWorker(client.queue, host)
        return min(ages, key=lambda pair: pair[1])


def build_app(called: str | None = None) -> typer.Typer:
    """The application. The worker's commands are complete only when `called` is one of them."""
    app = typer.Typer(name="llamaq", help=__doc__.splitlines()[0], no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    app.command("generate")(with_job_options(generate, without=("stream",)))
    app.command("chat")(with_job_options(chat, without=("stream",)))
    app.command("submit")(with_job_options(submit))
    for command in (stream, result, cancel, status, depth, workers, stats, health):
        app.command(command.__name__)(command)
    app.add_typer(dead.build_app(), name="dead")
    app.add_typer(slots.build_app(), name="slots")
    if called in WORKER_COMMANDS:
        register_worker_commands(app, called)
    else:
        for name, text in WORKER_COMMANDS.items():
            app.command(name, help=text)(lambda: None)
    return app


def register_worker_commands(app: typer.Typer, called: str) -> None:
    """Add the commands of the GPU host. Raises `MissingExtra` when what they need is not installed."""
    try:
        from llamaq.cli.worker_commands import register
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.startswith("llamaq."):
            raise
        raise MissingExtra(f"llamaq {called}", "worker") from exc
    if importlib.util.find_spec("llama_cpp") is None:  # only the processes that a supervisor starts import it
        raise MissingExtra(f"llamaq {called}", "worker")
    register(app)


def main() -> None:
    """The entry point of the `llamaq` command."""
    try:
        build_app(sys.argv[1] if len(sys.argv) > 1 else None)()
    except LlamaqError as exc:
        fail(str(exc))
    except RedisError as exc:
        fail(f"Redis: {exc}")


def fail(message: str) -> None:
    """One line on stderr, and exit code 1."""
    typer.echo(f"llamaq: {' '.join(message.split())}", err=True)
    sys.exit(1)
