"""The command `llamaq serve`: the HTTP server in front of the queues."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from llamaq.cli.generated_options import option, setting_help, with_options
from llamaq.common.errors import MissingExtra
from llamaq.common.settings import ClientSettings
from llamaq.gateway.settings import ServeSettings, serve_settings

NOT_OFFERED = frozenset({"event_ttl_s", "require_worker"})
"""Settings of a client that the server replaces by its own."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    fields = {name: field for name, field in ServeSettings.model_fields.items() if name not in NOT_OFFERED}
    options = [_option(name, field) for name, field in fields.items()]
    app.command("serve")(with_options(serve, options, into="settings_options"))


def serve(*, settings_options: dict[str, Any]) -> None:
    """Serve the queues over HTTP, with the APIs of OpenAI, Anthropic and llama-server. `model` names the queue."""
    settings = serve_settings(**settings_options)
    run(settings, on_start=lambda url: typer.echo(f"llamaq serves {url}", err=True))


def run(settings: ServeSettings, *, on_start: Callable[[str], None]) -> None:
    """Run the server until a signal ends it.

    Args:
        settings: The settings of the server.
        on_start: Called with the URL when connections are accepted.

    Raises:
        MissingExtra: `llamaq[serve]` is not installed.
    """
    try:
        from llamaq.gateway import server
    except ModuleNotFoundError as exc:
        raise MissingExtra("llamaq serve", "serve") from exc
    with server.bind(settings) as bound:
        on_start(server.url_of(settings, bound))
        server.build_server(settings).run([bound])


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    panel = "Redis and queue" if name in ClientSettings.model_fields else "HTTP"
    return option(name, _type_of(field.annotation), help_text=setting_help(name, field), panel=panel)


def _type_of(annotation: Any) -> type:
    """Return the type that an option is parsed as. Paths and lists are strings here; pydantic parses them later."""
    if get_origin(annotation) is UnionType:
        return _type_of(next(part for part in get_args(annotation) if part is not NoneType))
    return annotation if annotation in (int, float, bool) else str
