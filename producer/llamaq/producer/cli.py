"""The `llamaq` command. Errors are one line on stderr and exit code 1.

The commands of the GPU host (`worker`, `up`, `demo`) live in `llamaq.worker.cli`, which needs `llamaq[worker]` and
is imported only when one of them is called.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError

from llamaq.common.errors import LlamaqError, MissingExtra, NoWorker
from llamaq.common.messages import Worker
from llamaq.producer import cli_views as views
from llamaq.producer.cli_options import with_job_options
from llamaq.producer.client import AsyncClient
from llamaq.producer.sync import Client

WORKER_COMMANDS = {
    "worker": "Serve a queue: run its jobs on this machine.",
    "up": "The whole stack on this machine: Redis, unless one is named, and workers.",
    "demo": "Eight jobs streaming side by side through one llama.cpp batch.",
}

RedisUrl = Annotated[
    str | None, typer.Option(help="where Redis is [env: LLAMAQ_REDIS_URL] [default: redis://localhost:6379/0]")
]
Queue = Annotated[str | None, typer.Option(help="name of the queue [env: LLAMAQ_QUEUE] [default: default]")]
Wait = Annotated[
    float | None, typer.Option("--wait-s", help="how long to wait, in seconds [env: LLAMAQ_TIMEOUT_S] [default: 300]")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB_ID")]
MaxAge = Annotated[float, typer.Option(help="how old the youngest heartbeat may be, in seconds")]
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


def health(redis_url: RedisUrl = None, queue: Queues = None, max_age_s: MaxAge = 30.0) -> None:
    """Exit code 0 when Redis answers and each queue has a worker with a young heartbeat, else 1."""
    names: list[str | None] = [*queue] if queue else [None]
    for name in names:
        worker = asyncio.run(youngest_worker(redis_url, name, max_age_s))
        typer.echo(f"ok: {worker.card.worker} serves {worker.card.queue}")


async def youngest_worker(redis_url: str | None, queue: str | None, max_age_s: float) -> Worker:
    """The worker with the newest heartbeat. Raises `NoWorker` when that is older than `max_age_s`."""
    async with AsyncClient(redis_url, queue) as client:
        seconds, _ = await client.redis.time()
        found = await client.workers()
        newest = max(found, key=lambda worker: worker.heartbeat_ms, default=None)
        if newest is None or seconds - newest.heartbeat_ms / 1000 > max_age_s:
            raise NoWorker(client.queue)
        return newest


def build_app(called: str | None = None) -> typer.Typer:
    """The application. The worker's commands are complete only when `called` is one of them."""
    app = typer.Typer(name="llamaq", help=__doc__.splitlines()[0], no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    app.command("generate")(with_job_options(generate, without=("stream",)))
    app.command("chat")(with_job_options(chat, without=("stream",)))
    app.command("submit")(with_job_options(submit))
    for command in (stream, result, cancel, status, depth, workers, stats, health):
        app.command(command.__name__)(command)
    if called in WORKER_COMMANDS:
        register_worker_commands(app, called)
    else:
        for name, text in WORKER_COMMANDS.items():
            app.command(name, help=text)(lambda: None)
    return app


def register_worker_commands(app: typer.Typer, called: str) -> None:
    """Add the commands of the GPU host. Raises `MissingExtra` when what they need is not installed."""
    try:
        from llamaq.worker.cli import register
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.startswith("llamaq."):
            raise
        raise MissingExtra(f"llamaq {called}", "worker") from exc
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
