"""`llamaq slots`: look at a worker's slots, keep their states by name, and bring them back."""

from __future__ import annotations

from typing import Annotated

import typer

from llamaq.cli import views
from llamaq.cli.job_options import AsJson, Queue, RedisUrl
from llamaq.common.protocol.slot_commands import SlotFile
from llamaq.producer.sync import Client

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="letters, digits, '_' and '-'; no path")]
OptionalName = Annotated[str | None, typer.Argument(metavar="NAME", help="as `llamaq slots list` shows it")]
Slot = Annotated[int, typer.Option("--slot", help="number of the slot, from 0 on")]
OptionalSlot = Annotated[int | None, typer.Option("--slot", help="number of the slot, from 0 on")]
OfWorker = Annotated[str | None, typer.Option("--worker", help="which one, where several serve the queue")]
Wait = Annotated[
    float | None, typer.Option("--wait-s", help="how long to wait, in seconds [env: LLAMAQ_TIMEOUT_S] [default: 300]")
]


def show_list(
    redis_url: RedisUrl = None,
    queue: Queue = None,
    worker: OfWorker = None,
    wait_s: Wait = None,
    as_json: AsJson = False,
) -> None:
    """The slots of each worker, and the states that are saved there; with --json one object for each worker."""
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        found = client.slots(worker=worker)
        if not as_json:
            views.show_slots(found)
            return
        for one in found:
            views.show_json(one)


def save(
    name: NameArgument,
    slot: Slot,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    worker: OfWorker = None,
    wait_s: Wait = None,
    as_json: AsJson = False,
) -> None:
    """Save what a slot holds, under a name: of the job that runs there, or ran there last."""
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        _tell("saved", client.save_slot(slot, name, worker=worker), as_json)


def restore(
    name: NameArgument,
    slot: Slot,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    worker: OfWorker = None,
    wait_s: Wait = None,
    as_json: AsJson = False,
) -> None:
    """Bring a saved state back into an idle slot; jobs that begin like it do not compute it again."""
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        _tell("restored", client.restore_slot(slot, name, worker=worker), as_json)


def _tell(what: str, file: SlotFile, as_json: bool) -> None:
    if as_json:
        views.show_json(file)
    else:
        typer.echo(f"{what} {file.n_tokens} tokens, {file.n_bytes} bytes")


def erase(
    name: OptionalName = None,
    slot: OptionalSlot = None,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    worker: OfWorker = None,
    wait_s: Wait = None,
) -> None:
    """Delete a saved state, or forget what a slot holds."""
    if (name is None) == (slot is None):
        raise typer.BadParameter("give either the NAME of a saved state, or --slot")
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        if name is not None:
            client.erase_saved_slot(name, worker=worker)
            typer.echo("erased")
        elif slot is not None:
            typer.echo(f"erased {client.erase_slot(slot, worker=worker)} tokens")


def build_app() -> typer.Typer:
    """The commands below `llamaq slots`."""
    app = typer.Typer(help="Workers' slots: what they hold, saved and restored by name.", no_args_is_help=True)
    app.command("list")(show_list)
    for command in (save, restore, erase):
        app.command(command.__name__)(command)
    return app
