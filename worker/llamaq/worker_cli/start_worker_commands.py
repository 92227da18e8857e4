"""The commands that start workers on this host: `llamaq worker`, `llamaq up` and `llamaq demo`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from types import FrameType, NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from typer.core import TyperCommand

from llamaq.cli.exit_codes import EXIT_OK
from llamaq.cli.generated_options import option, setting_help, with_options
from llamaq.common.errors import InvalidSettings
from llamaq.common.logging_setup import LogFormat, configure_logging
from llamaq.common.settings import QueueSettings
from llamaq.gateway.settings import ServeSettings, serve_settings
from llamaq.worker.local.supervise_local import DEFAULT_PORT
from llamaq.worker.process.stop_requests import handle_stop_signals
from llamaq.worker.settings import WorkerSettings, load_settings
from llamaq.worker_cli.http_server_process import HttpServerProcess

log = logging.getLogger(__name__)

_SERVE_FIELDS = ServeSettings.model_fields

Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.", show_default=False)]


class CommandWithSections(TyperCommand):
    """A command whose help has a section for each group of options in narrow terminals and pipes too."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections. typer itself shows groups only in the tables of rich."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("worker", cls=CommandWithSections)(with_settings(run_worker))
    app.command("up", cls=CommandWithSections)(with_settings(run_up))
    app.command("demo")(run_demo)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with one option for each field of `WorkerSettings`.

    Its parameter `settings_options` receives their values by name. An option that is not given is None: then the
    environment variable, the TOML file or the default applies.
    """
    options = [_option(name, field, group) for group in _groups() for name, field in group.model_fields.items()]
    return with_options(command, options, into="settings_options")


def _groups() -> list[type[BaseModel]]:
    """Return the groups of settings. Each is a section of `--help`; its docstring's first sentence is the title."""
    return [base for base in WorkerSettings.__bases__ if issubclass(base, BaseModel)]


def _option(name: str, field: FieldInfo, group: type[BaseModel]) -> inspect.Parameter:
    title = (group.__doc__ or "").partition(".")[0]
    return option(name, _option_type(field.annotation), help_text=setting_help(name, field), panel=title)


def _option_type(annotation: Any) -> type:
    """Return the type that an option is parsed as. Tuples and literals are strings here; pydantic parses them later."""
    if get_origin(annotation) in (tuple, Literal):
        return str
    if get_origin(annotation) is UnionType:
        return _option_type(next(part for part in get_args(annotation) if part is not NoneType))
    return annotation if annotation in (int, float, bool) else str


def run_worker(
    *,
    config: Config = None,
    supervised: Annotated[
        bool, typer.Option("--supervise/--no-supervise", help="Restart the worker when it crashes or hangs.")
    ] = True,
    settings_options: dict[str, Any],
) -> None:
    """Serve a queue: run its jobs on this machine. SIGTERM finishes running jobs first; a second one stops at once."""
    settings = load_settings(config, **settings_options)
    configure_logging(settings.log_level, settings.log_format)
    note_demo_model(settings)
    if supervised or settings.devices:
        from llamaq.worker.local.supervise_local import supervise

        raise typer.Exit(supervise(settings))
    from llamaq.worker.process.child_main import check_and_serve

    raise typer.Exit(check_and_serve(settings))


def run_up(
    *,
    config: Config = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="TCP port of the embedded Redis, on 127.0.0.1.")
    ] = DEFAULT_PORT,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder where the embedded Redis stores its data. If not set: the data is deleted when `up` ends."
        ),
    ] = None,
    with_http: Annotated[
        bool, typer.Option("--http/--no-http", help="Start an HTTP server too: `llamaq serve`.")
    ] = True,
    http_host: Annotated[str | None, typer.Option(help=setting_help("http_host", _SERVE_FIELDS["http_host"]))] = None,
    http_port: Annotated[int | None, typer.Option(help=setting_help("http_port", _SERVE_FIELDS["http_port"]))] = None,
    settings_options: dict[str, Any],
) -> None:
    """Start Redis, workers and an HTTP server on this machine. Redis is embedded, unless --redis-url is given."""
    handle_stop_signals(_end)
    from llamaq.worker.local.embedded_redis import EmbeddedRedis
    from llamaq.worker.local.supervise_local import supervise

    settings = load_settings(config, **settings_options)
    configure_logging(settings.log_level, settings.log_format)
    note_demo_model(settings)
    if "redis_url" in settings.model_fields_set:
        if data_dir is not None:
            raise InvalidSettings("--data-dir: unset --redis-url (LLAMAQ_REDIS_URL), whose server stores its own data")
        with _http_server(settings, settings.redis_url, with_http, http_host, http_port) as server:
            _print_note(settings, "Redis: the server of --redis-url (LLAMAQ_REDIS_URL); unset, this command starts one")
            _print_note(settings, f"HTTP:  {server.state}")
            _print_note(settings, f"Try:   {example_command(settings, None)}")
            raise typer.Exit(supervise(settings, also_check=server.check))
    with (
        EmbeddedRedis(port=port, data_dir=data_dir) as redis,
        _http_server(settings, redis.url, with_http, http_host, http_port) as server,
    ):
        place = f"in {data_dir}" if data_dir else "until this command ends; --data-dir keeps it"
        _print_note(settings, f"Redis: {redis.url} (embedded; its data is stored {place})")
        _print_note(settings, f"HTTP:  {server.state}")
        _print_note(settings, f"Try:   {example_command(settings, redis.url)}")
        raise typer.Exit(supervise(settings, redis, also_check=server.check))


def _end(_: int, __: FrameType | None) -> NoReturn:
    """End `up` before its workers run. The next signals do not interrupt the end of Redis and the HTTP server."""
    handle_stop_signals(lambda *_: None)
    raise SystemExit(EXIT_OK)


def _http_server(
    settings: WorkerSettings, redis_url: str, with_http: bool, http_host: str | None, http_port: int | None
) -> HttpServerProcess:
    """Return the HTTP server for the queue of these workers."""
    shared = [*(name for name in QueueSettings.model_fields if name != "redis_url"), "log_level", "log_format"]
    same = {name: getattr(settings, name) for name in shared}
    chosen = serve_settings(redis_url=redis_url, http_host=http_host, http_port=http_port, **same)
    return HttpServerProcess(chosen, is_wanted=with_http)


def run_demo(
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Number of jobs, submitted at the same time.")] = 8,
    model: Annotated[
        str | None, typer.Option(help="A GGUF file. If not set: LLAMAQ_MODEL, or the demo model of llamaq.")
    ] = None,
) -> None:
    """Show eight jobs that stream side by side through one llama.cpp batch. The demo starts Redis and a worker."""
    from llamaq.worker_cli import demo

    logging.getLogger("llamaq").addHandler(logging.NullHandler())
    raise typer.Exit(demo.run(jobs, model))


def example_command(settings: WorkerSettings, url: str | None) -> str:
    """Return a `llamaq generate` command line that submits a job to a worker with these settings.

    Args:
        settings: The settings of the worker.
        url: The Redis URL to show. None for a URL from the user, which may contain a password.
    """
    queue = f" --queue {settings.queue}" if "queue" in settings.model_fields_set else ""
    prefix = f"LLAMAQ_KEY_PREFIX={settings.key_prefix} " if "key_prefix" in settings.model_fields_set else ""
    return f"{prefix}llamaq generate 'Once upon a time'{queue}" + (f" --redis-url {url}" if url else "")


def note_demo_model(settings: WorkerSettings) -> None:
    """Print a note if no model is set, because then the worker serves the demo model."""
    if settings.model is None:
        _print_note(settings, "No --model given: serving the small demo model of llamaq (see its MODEL_CARD.md).")


def _print_note(settings: WorkerSettings, text: str) -> None:
    """Print a line for the user; with `--log-format json`, every line is a log message."""
    if settings.log_format is LogFormat.JSON:
        log.info("%s", text)
        return
    Console(stderr=True, soft_wrap=True, highlight=False).print(text, markup=False)
