"""The `llamaq` command. After an error it prints one line on standard error and exits with code 1.

The commands of a GPU host (`worker`, `up`, `demo`) need `llamaq[worker]`, so their module is imported only when one of
them is called.
"""

from __future__ import annotations

import importlib.util
import sys

import typer
from redis.exceptions import RedisError

from llamaq.cli import dead_letter_commands, job_commands, queue_commands, slot_commands
from llamaq.common.errors import LlamaqError, MissingExtra

WORKER_COMMANDS = {
    "worker": "Serve a queue: run its jobs on this machine.",
    "up": "Start Redis and workers on this machine, or workers alone if --redis-url is given.",
    "demo": "Show eight jobs that stream side by side through one llama.cpp batch.",
}


def build_app(called: str | None = None) -> typer.Typer:
    """Return the application.

    Args:
        called: The name of the called command. Only if it is one of `WORKER_COMMANDS`, their module is imported and
            their options are added.
    """
    app = typer.Typer(
        name="llamaq",
        help="Durable queue, streaming and batched text generation with llama.cpp and Redis.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)
    job_commands.register(app)
    queue_commands.register(app)
    app.add_typer(dead_letter_commands.build_app(), name="dead")
    app.add_typer(slot_commands.build_app(), name="slots")
    if called in WORKER_COMMANDS:
        register_worker_commands(app, called)
    else:
        for name, text in WORKER_COMMANDS.items():
            app.command(name, help=text)(lambda: None)
    return app


def register_worker_commands(app: typer.Typer, called: str) -> None:
    """Add the commands of a GPU host to the application.

    Raises:
        MissingExtra: `llamaq[worker]` is not installed.
    """
    try:
        from llamaq.cli.gpu_host_commands import register
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.startswith("llamaq."):
            raise
        raise MissingExtra(f"llamaq {called}", "worker") from exc
    if importlib.util.find_spec("llama_cpp") is None:  # not imported here: only the worker processes need it
        raise MissingExtra(f"llamaq {called}", "worker")
    register(app)


def main() -> None:
    """Run the `llamaq` command."""
    try:
        build_app(sys.argv[1] if len(sys.argv) > 1 else None)()
    except LlamaqError as exc:
        fail(str(exc))
    except RedisError as exc:
        fail(f"Redis: {exc}")


def fail(message: str) -> None:
    """Print one line on standard error and exit with code 1."""
    typer.echo(f"llamaq: {' '.join(message.split())}", err=True)
    sys.exit(1)
