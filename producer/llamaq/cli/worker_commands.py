"""The commands of the GPU host: `llamaq worker`, `llamaq up`, `llamaq demo`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console

from llamaq.cli.generated_options import flag, with_flags
from llamaq.common.settings import ENV_PREFIX
from llamaq.worker.local.local_stack import DEFAULT_PORT
from llamaq.worker.settings import WorkerSettings, load_settings

console = Console(stderr=True, soft_wrap=True, highlight=False)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("worker")(with_settings(run_worker))
    app.command("up")(with_settings(run_up))
    app.command("demo")(run_demo)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command one option for each field of `WorkerSettings`.

    An option that is not given is None, and then the environment, the file or the default counts.
    """
    flags = [_flag(name, field, group) for group in _groups() for name, field in group.model_fields.items()]
    return with_flags(command, flags, into="flags")


def _groups() -> list[type[BaseModel]]:
    """The groups of settings, each a section of `--help` under the first sentence of its docstring."""
    return [base for base in WorkerSettings.__bases__ if issubclass(base, BaseModel)]


def _flag(name: str, field: FieldInfo, group: type[BaseModel]) -> inspect.Parameter:
    default = field.get_default(call_default_factory=True, validated_data={})
    shown = "" if default in (None, ()) else f"default {default}; "
    # In parentheses, because rich takes square brackets for markup.
    help_text = f"{field.description} ({shown}{ENV_PREFIX}{name.upper()})"
    return flag(name, _flag_type(field.annotation), help_text=help_text, panel=(group.__doc__ or "").partition(".")[0])


def _flag_type(annotation: Any) -> type:
    """The type that a flag is read as; tuples and literals are checked later, by pydantic."""
    if get_origin(annotation) in (tuple, Literal):
        return str
    if get_origin(annotation) is UnionType:
        return _flag_type(next(part for part in get_args(annotation) if part is not NoneType))
    return annotation if annotation in (int, float, bool) else str


Config = Annotated[Path | None, typer.Option("--config", help="a TOML file with settings", show_default=False)]


def run_worker(
    *,
    config: Config = None,
    supervised: Annotated[
        bool, typer.Option("--supervise/--no-supervise", help="start the worker again when it dies or hangs")
    ] = True,
    flags: dict[str, Any],
) -> None:
    """Serve a queue: run its jobs on this machine until SIGTERM (drains) or a second one (ends at once)."""
    from llamaq.worker.process.logging_setup import configure_logging

    settings = load_settings(config, **flags)
    configure_logging(settings.log_level)
    say_model(settings)
    if supervised or settings.devices:
        from llamaq.worker.local.local_stack import supervise

        raise typer.Exit(supervise(settings))
    from llamaq.worker.process.worker_process import serve

    raise typer.Exit(serve(settings))


def run_up(
    *,
    config: Config = None,
    port: Annotated[int, typer.Option(help="port of the embedded Redis, on 127.0.0.1")] = DEFAULT_PORT,
    data_dir: Annotated[Path | None, typer.Option(help="where the embedded Redis keeps its data; else memory")] = None,
    flags: dict[str, Any],
) -> None:
    """The whole stack on this machine: Redis (embedded, unless --redis-url names one) and workers."""
    from llamaq.worker.local.local_stack import redis_for, supervise
    from llamaq.worker.process.logging_setup import configure_logging

    settings = load_settings(config, **flags)
    configure_logging(settings.log_level)
    say_model(settings)
    named = settings.redis_url if "redis_url" in settings.model_fields_set else None
    with redis_for(named, port=port, data_dir=data_dir) as url:
        if named is None:
            where = f"in {data_dir}" if data_dir else "in memory alone: --data-dir keeps it"
            console.print(f"Redis: {url} (embedded, {where})", markup=False)
        console.print(f"Try:   {example(settings, url if named is None else None)}", markup=False)
        raise typer.Exit(supervise(settings.model_copy(update={"redis_url": url})))


def run_demo(
    jobs: Annotated[int, typer.Option(min=1, max=64, help="jobs to submit at once")] = 8,
    model: Annotated[str | None, typer.Option(help="a GGUF file instead of the model that ships")] = None,
) -> None:
    """Eight jobs streaming side by side through one llama.cpp batch, with everything they need started for them."""
    from llamaq.cli.demo import show

    logging.getLogger("llamaq").addHandler(logging.NullHandler())
    raise typer.Exit(show(jobs, model))


def example(settings: WorkerSettings, url: str | None) -> str:
    """A command that shows the stack at work. A URL that the user named is left out: it may hold a password."""
    queue = f" --queue {settings.queue}" if "queue" in settings.model_fields_set else ""
    return f"llamaq generate 'Once upon a time'{queue}" + (f" --redis-url {url}" if url else "")


def say_model(settings: WorkerSettings) -> None:
    """Tell the user when nothing but the demo model is served."""
    if settings.model is None:
        console.print("No --model given: serving the small demo model that ships with llamaq (see its MODEL_CARD.md).")
