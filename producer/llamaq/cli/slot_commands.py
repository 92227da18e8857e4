"""`llamaq slots`: list the slots of workers, and save, restore and erase their states."""

from __future__ import annotations

from typing import Annotated

import typer

from llamaq.cli import views
from llamaq.cli.common_options import AsJson, Queue, RedisUrl, WaitForReply
from llamaq.producer import Client, SlotFile

NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The name of the saved state: 1 to 64 letters, digits, `_` and `-`."),
]
OptionalName = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The name of the saved state, as shown by `llamaq slots list`."),
]
Slot = Annotated[int, typer.Option("--slot", help="Index of the slot, from 0 on.")]
OptionalSlot = Annotated[int | None, typer.Option("--slot", help="Index of the slot, from 0 on.")]
WorkerId = Annotated[
    str | None, typer.Option("--worker", help="Id of the worker. Required if several workers serve the queue.")
]
ListedWorkerId = Annotated[str | None, typer.Option("--worker", help="Id of one worker. Without it, all are listed.")]


def show_list(
    redis_url: RedisUrl = None,
    queue: Queue = None,
    worker: ListedWorkerId = None,
    wait_s: WaitForReply = None,
    as_json: AsJson = False,
) -> None:
    """List the slots of each worker and the states saved on its host. With --json, print one object per worker."""
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        found = client.slots(worker=worker)
        if as_json:
            views.show_json(*found)
        else:
            views.show_slots(found)


def save(
    name: NameArgument,
    slot: Slot,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    worker: WorkerId = None,
    wait_s: WaitForReply = None,
    as_json: AsJson = False,
) -> None:
    """Save the state of a slot's running or last job under a name, on the worker's host."""
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        _show_file("saved", client.save_slot(slot, name, worker=worker), as_json)


def restore(
    name: NameArgument,
    slot: Slot,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    worker: WorkerId = None,
    wait_s: WaitForReply = None,
    as_json: AsJson = False,
) -> None:
    """Load a saved state into an idle slot. Jobs whose prompts begin with the same tokens then reuse them."""
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        _show_file("restored", client.restore_slot(slot, name, worker=worker), as_json)


def _show_file(action: str, file: SlotFile, as_json: bool) -> None:
    if as_json:
        views.show_json(file)
    else:
        took = "" if file.duration_ms is None else f", in {file.duration_ms:.1f} ms"
        typer.echo(f"{action} {file.n_tokens} tokens, {file.n_bytes} bytes{took}")


def erase(
    name: OptionalName = None,
    slot: OptionalSlot = None,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    worker: WorkerId = None,
    wait_s: WaitForReply = None,
    as_json: AsJson = False,
) -> None:
    """Delete a saved state, or evict the tokens of an idle slot from the KV cache."""
    if (name is None) == (slot is None):
        raise typer.BadParameter("give either the NAME of a saved state or --slot")
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        if name is not None:
            client.erase_saved_slot(name, worker=worker)
        n_tokens = None if slot is None else client.erase_slot(slot, worker=worker)
        if as_json:
            views.show_json_fields(name=name, slot=slot, n_tokens=n_tokens)
        else:
            typer.echo("erased" if n_tokens is None else f"erased {n_tokens} tokens")


def build_app() -> typer.Typer:
    """Return the commands of `llamaq slots`."""
    app = typer.Typer(help="List the slots of workers, and save, restore and erase their states.", no_args_is_help=True)
    app.command("list")(show_list)
    for command in (save, restore, erase):
        app.command(command.__name__)(command)
    return app
