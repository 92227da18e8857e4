"""`llamaq keys`: add, list and revoke the API keys of `llamaq serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from llamaq.cli import views
from llamaq.cli.columns import show_rows
from llamaq.cli.common_options import AsJson, RedisUrl
from llamaq.common.errors import InvalidRequest, InvalidSettings
from llamaq.gateway.keys.key_file import add_key
from llamaq.gateway.keys.key_record import KeyRecord
from llamaq.gateway.keys.key_store import KeyStore
from llamaq.producer import AsyncClient, Priority

T = TypeVar("T")

PERMISSIONS = ("share_system_prompt", "manage_slots")
"""Fields of a key that allow more than it may do without them."""

_FIELDS = KeyRecord.model_fields
Name = Annotated[str, typer.Argument(help=_FIELDS["name"].description)]


def add(
    name: Name,
    queues: Annotated[
        str, typer.Option(help="Queues that the key may use, separated by commas. If not set: all.")
    ] = "",
    priority: Annotated[Priority, typer.Option(help=_FIELDS["priority"].description)] = Priority.INTERACTIVE,
    requests_per_minute: Annotated[int | None, typer.Option(help=_FIELDS["requests_per_minute"].description)] = None,
    max_open: Annotated[int | None, typer.Option(help=_FIELDS["max_open"].description)] = None,
    cache_salt: Annotated[str | None, typer.Option(help=_FIELDS["cache_salt"].description)] = None,
    share_system_prompt: Annotated[
        bool, typer.Option("--share-system-prompt", help=_FIELDS["share_system_prompt"].description)
    ] = False,
    manage_slots: Annotated[bool, typer.Option("--manage-slots", help=_FIELDS["manage_slots"].description)] = False,
    file: Annotated[
        Path | None, typer.Option(help="Write the hash of the key to this file, for `llamaq serve --keys-file`.")
    ] = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Add an API key and print it. It is shown only now, because its hash alone is stored."""
    fields = {
        "name": name,
        "queues": tuple(queue.strip() for queue in queues.split(",") if queue.strip()),
        "priority": priority,
        "requests_per_minute": requests_per_minute,
        "max_open": max_open,
        "cache_salt": cache_salt,
        "share_system_prompt": share_system_prompt,
        "manage_slots": manage_slots,
    }
    if file is None:
        key = _with_store(redis_url, lambda store: store.add(**fields))
    else:
        try:
            key = add_key(file, **fields)
        except OSError as exc:
            raise InvalidSettings(f"--file: {file} cannot be written: {exc.strerror or exc}") from exc
    if as_json:
        views.show_json_fields(name=name, key=key)
    else:
        typer.echo(key)


def list_keys(redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """List the API keys by name, without their secrets. With --json, print one object per key."""
    records = _with_store(redis_url, lambda store: store.list())
    if as_json:
        views.show_json(*records)
        return
    rows = [
        (
            record.name,
            ",".join(record.queues) or "all",
            record.priority.value,
            str(record.requests_per_minute or "-"),
            str(record.max_open or "-"),
            ",".join(name for name in PERMISSIONS if getattr(record, name)) or "-",
            datetime.fromtimestamp(record.created_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M"),
        )
        for record in records
    ]
    columns = ("NAME", "QUEUES", "PRIORITY", "PER MINUTE", "OPEN", "PERMISSIONS", "ADDED (UTC)")
    show_rows(columns, rows, missing="no keys")


def revoke(name: Name, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Revoke an API key. Servers refuse it within two seconds; its running requests continue."""
    if not _with_store(redis_url, lambda store: store.revoke(name)):
        raise InvalidRequest(f"name: there is no key {name[:100]!r}; `llamaq keys list` shows the keys")
    if as_json:
        views.show_json_fields(name=name)


def _with_store(redis_url: str | None, action: Callable[[KeyStore], Awaitable[T]]) -> T:
    async def run() -> T:
        async with AsyncClient(redis_url) as client:
            return await action(KeyStore(client.redis, client.keys))

    return asyncio.run(run())


def build_app() -> typer.Typer:
    """Return the commands of `llamaq keys`."""
    app = typer.Typer(help="Manage the API keys of `llamaq serve --require-key`.")
    app.command("add")(add)
    app.command("list")(list_keys)
    app.command("revoke")(revoke)
    return app
