"""`llamaq dead`: list, show, retry and purge dead letters."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from llamaq.cli import views
from llamaq.cli.common_options import AsJson, Queue, RedisUrl, Yes
from llamaq.cli.error_report import explain
from llamaq.cli.exit_codes import EXIT_FAILED
from llamaq.common.errors import DeadLetterNotFound, InvalidRequest, JobNotFound, ProtocolError
from llamaq.producer import Client

ERRORS_OF_ONE_LETTER = (DeadLetterNotFound, InvalidRequest, JobNotFound, ProtocolError)
"""Errors after which `retry --all` retries the next letter."""

LetterArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The id of a dead letter, as shown by `llamaq dead list`.")
]
OptionalLetter = Annotated[
    str | None, typer.Argument(metavar="ID", help="The id of a dead letter, as shown by `llamaq dead list`.")
]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]


def show_list(redis_url: RedisUrl = None, queue: Queue = None, as_json: AsJson = False) -> None:
    """List the dead letters of a queue, newest first. With --json, print one object per letter."""
    with Client(redis_url, queue) as client:
        letters = client.dead_letters()
        if as_json:
            views.show_json(*letters)
        else:
            views.show_dead_letters(letters, client.queue)


def show(letter_id: LetterArgument, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Show one dead letter with its request and its generated text."""
    with Client(redis_url) as client:
        letter = client.dead_letter(letter_id)
        if as_json:
            views.show_json(letter)
        else:
            views.show_dead_letter(letter)


def retry(
    letter_id: OptionalLetter = None,
    all_letters: All = False,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    as_json: AsJson = False,
) -> None:
    """Submit a dead job again as a new job, remove the dead letter, print the new id. With --all, retry every job."""
    n_failed = 0
    with Client(redis_url, queue) as client:
        for selected in _select(client, letter_id, all_letters=all_letters, only_jobs=True):
            try:
                new_id = client.retry_dead_letter(selected).id
            except ERRORS_OF_ONE_LETTER as exc:
                if not all_letters:
                    raise
                n_failed += 1
                typer.echo(f"llamaq: {selected} is not retried: {explain(exc)}", err=True)
                continue
            if as_json:
                views.show_json_fields(id=selected, job_id=new_id)
            else:
                typer.echo(new_id)
    if n_failed:
        raise typer.Exit(EXIT_FAILED)


def purge(
    letter_id: OptionalLetter = None,
    all_letters: All = False,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove one dead letter, or all of them with --all. With --json, print their ids."""
    ignored = (DeadLetterNotFound,) if all_letters else ()  # another process has removed the letter just now
    with Client(redis_url, queue) as client:
        letters = _select(client, letter_id, all_letters=all_letters)
        question = f"Remove all dead letters of queue {client.queue!r}?"
        if all_letters and letters and not yes and not typer.confirm(question, err=True):
            raise typer.Exit(EXIT_FAILED)
        for selected in letters:
            with suppress(*ignored):
                client.purge_dead_letter(selected)
                if as_json:
                    views.show_json_fields(id=selected)


def _select(client: Client, letter_id: str | None, *, all_letters: bool, only_jobs: bool = False) -> list[str]:
    """Return the ids of the selected letters, oldest first. `only_jobs` leaves out entries that are not jobs."""
    if all_letters == (letter_id is not None):
        raise typer.BadParameter("give either one ID or --all")
    if letter_id is not None:
        return [letter_id]
    letters = reversed(client.dead_letters())
    return [letter.id for letter in letters if letter.job_id is not None or not only_jobs]


def build_app() -> typer.Typer:
    """Return the commands of `llamaq dead`."""
    app = typer.Typer(
        help="Manage dead letters: jobs that crashed workers, failed after their last retry or are "
        "damaged, and queue entries that are not jobs."
    )
    app.command("list")(show_list)
    for command in (show, retry, purge):
        app.command(command.__name__)(command)
    return app
