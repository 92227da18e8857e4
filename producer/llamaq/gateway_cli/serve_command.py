"""The command `llamaq serve`: the HTTP server in front of the queues."""

from __future__ import annotations

import inspect
import logging
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from llamaq.cli.generated_options import option, setting_help, with_options
from llamaq.common.errors import InvalidSettings, MissingExtra
from llamaq.common.logging_setup import configure_logging
from llamaq.common.settings import ClientSettings
from llamaq.gateway.settings import ServeSettings, serve_settings

log = logging.getLogger(__name__)

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
    try:
        from llamaq.gateway import uvicorn_server
    except ModuleNotFoundError as exc:
        raise MissingExtra("llamaq serve", "serve") from exc
    configure_logging(settings.log_level, settings.log_format)
    try:
        bound = uvicorn_server.bind(settings)
    except OSError as exc:
        place = f"{settings.http_host} port {settings.http_port}"
        raise InvalidSettings(f"--http-host, --http-port: cannot listen at {place}: {exc.strerror}") from exc
    with bound:
        server = uvicorn_server.build_server(settings)
        log.info("http.ready url=%s", uvicorn_server.url_of(settings, bound))
        server.run([bound])


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    panel = "Redis and queue" if name in ClientSettings.model_fields else "HTTP"
    return option(name, _type_of(field.annotation), help_text=setting_help(name, field), panel=panel)


def _type_of(annotation: Any) -> type:
    """Return the type that an option is parsed as. Paths and lists are strings here; pydantic parses them later."""
    if get_origin(annotation) is UnionType:
        return _type_of(next(part for part in get_args(annotation) if part is not NoneType))
    return annotation if annotation in (int, float, bool) else str
