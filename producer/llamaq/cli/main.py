"""The `llamaq` command. After an error it prints one line on standard error, and exits with a code of `exit_codes`.

The commands of a GPU host (`worker`, `up`, `demo`) are in `llamaq[worker]`. Their module is imported only when one of
them is called. The commands of the HTTP server (`serve`, `keys`) are in `llamaq[serve]`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import entry_points, version
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from redis.exceptions import RedisError
from typer.core import TyperGroup

from llamaq.cli import (
    bulk_commands,
    dead_letter_commands,
    embed_commands,
    job_commands,
    metrics_command,
    queue_mode_commands,
    queue_status_commands,
    slot_commands,
)
from llamaq.cli.columns import replace_unencodable_in_terminal
from llamaq.cli.error_report import exit_code_of, explain
from llamaq.cli.exit_codes import EXIT_INTERRUPTED
from llamaq.cli.job_options import add_hint
from llamaq.cli.top import command as top_command
from llamaq.common.errors import LlamaqError, MissingExtra

COMMANDS_GROUP = "llamaq.commands"
"""The group of the entry point with which `llamaq-worker` adds the `WORKER_COMMANDS`. It is loaded for these alone."""
WORKER_COMMANDS = {
    "worker": "Serve a queue: run its jobs on this machine.",
    "up": "Start Redis, workers and an HTTP server on this machine.",
    "demo": "Show eight jobs that stream side by side through one llama.cpp batch.",
}
SERVER_COMMANDS = {
    "serve": "Serve the queues over HTTP, with the APIs of OpenAI, Anthropic and llama-server.",
    "keys": "Manage the API keys of `llamaq serve --require-key`.",
}
TABLE_WIDTH = 120
"""In a narrower terminal, the tables of a help text cut the names of options."""


class InterruptibleGroup(TyperGroup):
    """A group of commands that Ctrl-C ends with the exit code 130 and without a traceback.

    Errors for unknown options of jobs name the option that is meant.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the called command."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, typer.Abort) as exc:  # typer raises Abort if Ctrl-C interrupts a question
            if sys.stderr.isatty():
                typer.echo(err=True)  # the terminal has shown ^C in the middle of a line
            raise typer.Exit(EXIT_INTERRUPTED) from exc
        except Exception as exc:
            add_hint(exc)
            raise


def build_app(called: str | None = None) -> typer.Typer:
    """Return the application.

    Args:
        called: The name of the called command. The module of the `WORKER_COMMANDS` is imported, and their options are
            added, only if it is one of them.

    Raises:
        MissingExtra: The called command needs an extra that is not installed.
    """
    app = typer.Typer(
        name="llamaq",
        cls=InterruptibleGroup,
        help="Durable queue, streaming and batched text generation with llama.cpp and Redis.",
        no_args_is_help=True,
        rich_markup_mode="rich" if shutil.get_terminal_size().columns >= TABLE_WIDTH else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_read_options)
    job_commands.register(app)
    embed_commands.register(app)
    queue_status_commands.register(app)
    queue_mode_commands.register(app)
    top_command.register(app)
    register_server_commands(app, called)
    metrics_command.register(app)
    app.add_typer(bulk_commands.build_app(), name="bulk")
    app.add_typer(dead_letter_commands.build_app(), name="dead")
    app.add_typer(slot_commands.build_app(), name="slots")
    if called in WORKER_COMMANDS:
        register_worker_commands(app, called)
    else:
        _list_only(app, WORKER_COMMANDS)
    return app


def _list_only(app: typer.Typer, commands: Mapping[str, str]) -> None:
    """Add commands that are not called to the help text."""
    for name, text in commands.items():
        app.command(name, help=text)(lambda: None)


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"llamaq {version('llamaq')}")
        raise typer.Exit


def _read_options(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Read the options that come before the name of a command. The callbacks of the options do the work."""


def register_server_commands(app: typer.Typer, called: str | None) -> None:
    """Add the commands of the HTTP server to the application.

    Raises:
        MissingExtra: One of them is called, and `llamaq[serve]` is not installed.
    """
    if importlib.util.find_spec("llamaq.gateway_cli") is not None:
        importlib.import_module("llamaq.gateway_cli.server_commands").register(app)
    elif called in SERVER_COMMANDS:
        raise MissingExtra(f"llamaq {called}", "serve")
    else:
        _list_only(app, SERVER_COMMANDS)


def register_worker_commands(app: typer.Typer, called: str) -> None:
    """Add the commands of a GPU host to the application.

    Raises:
        MissingExtra: `llamaq[worker]` is not installed.
    """
    found = entry_points(group=COMMANDS_GROUP)
    # llama_cpp is not imported here: only the worker processes need it.
    if not found or importlib.util.find_spec("llama_cpp") is None:
        raise MissingExtra(f"llamaq {called}", "worker")
    try:
        registers = [entry_point.load() for entry_point in found]
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("llamaq."):
            raise
        raise MissingExtra(f"llamaq {called}", "worker") from exc
    for register in registers:
        register(app)


def main() -> None:
    """Run the command."""
    # The commands print a notice themselves if no worker serves the queue.
    logging.getLogger("llamaq.producer.worker_watch").setLevel(logging.ERROR)
    if sys.stdout is None:
        sys.stdout = _ClosedOutput(BytesIO())
    for stream in (sys.stdout, sys.stderr):
        replace_unencodable_in_terminal(stream)
    try:
        build_app(sys.argv[1] if len(sys.argv) > 1 else None)()
    except (LlamaqError, RedisError, OSError, UnicodeEncodeError) as exc:  # the last two: the output cannot be written
        with suppress(OSError):
            typer.echo(f"llamaq: {explain(exc)}", err=True)
        sys.exit(exit_code_of(exc))
    finally:
        for stream in (sys.stdout, sys.stderr):
            drop_unwritable_text(stream)


class _ClosedOutput(TextIOWrapper):
    """Stands for a standard output that was closed before the start. Otherwise all text would be lost."""

    def write(self, _: str, /) -> int:
        raise OSError("standard output is closed")


def drop_unwritable_text(stream: TextIO | None) -> None:
    """Drop the text that a stream cannot write, for example to a full disk.

    Otherwise Python tries it again at its end, prints an error and changes the exit code.
    """
    if stream is None or stream.closed:
        return
    try:
        stream.flush()
    except OSError:
        with suppress(OSError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
