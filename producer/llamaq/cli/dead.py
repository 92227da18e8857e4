"""`llamaq dead`: look at what was given up, try it again, or throw it away."""

from __future__ import annotations

from typing import Annotated

import typer

from llamaq.cli import views
from llamaq.cli.job_options import AsJson, Queue, RedisUrl
from llamaq.producer.sync import Client

LetterArgument = Annotated[str, typer.Argument(metavar="ID")]
OptionalLetter = Annotated[str | None, typer.Argument(metavar="ID", help="as `llamaq dead list` shows it")]
All = Annotated[bool, typer.Option("--all", help="all of the queue")]


def show_list(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """What was given up, newest first; with --json one object for each."""
    with Client(redis_url, queue) as client:
        letters = client.dead_letters()
        if not as_json:
            views.show_dead_letters(letters)
            return
        for letter in letters:
            views.show_json(letter)


def show(letter_id: LetterArgument, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """All that is kept of one: its request, and what it had generated."""
    with Client(redis_url) as client:
        letter = client.dead_letter(letter_id)
        if as_json:
            views.show_json(letter)
        else:
            views.show_dead_letter(letter)


def retry(
    letter_id: OptionalLetter = None, everything: All = False, redis_url: RedisUrl = None, queue: Queue = None
) -> None:
    """Submit a job again, as a new one, and print its id; with --all every one that was a job."""
    with Client(redis_url, queue) as client:
        for one in _chosen(client, letter_id, everything=everything, only_jobs=True):
            typer.echo(client.retry_dead_letter(one).id)


def purge(
    letter_id: OptionalLetter = None, everything: All = False, redis_url: RedisUrl = None, queue: Queue = None
) -> None:
    """Throw one away, or all."""
    with Client(redis_url, queue) as client:
        for one in _chosen(client, letter_id, everything=everything):
            client.purge_dead_letter(one)


def _chosen(client: Client, letter_id: str | None, *, everything: bool, only_jobs: bool = False) -> list[str]:
    """The letters that a command is about, oldest first."""
    if everything == (letter_id is not None):
        raise typer.BadParameter("give either the ID of one, or --all")
    if letter_id is not None:
        return [letter_id]
    letters = reversed(client.dead_letters())
    return [letter.id for letter in letters if letter.job_id is not None or not only_jobs]


def build_app() -> typer.Typer:
    """The commands below `llamaq dead`."""
    app = typer.Typer(help="The dead letters: jobs that workers died of, and entries that were no job.")
    app.command("list")(show_list)
    for command in (show, retry, purge):
        app.command(command.__name__)(command)
    return app
