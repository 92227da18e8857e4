"""The commands for jobs: `generate`, `chat`, `submit`, `stream`, `result`, `cancel` and `status`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from llamaq.cli import views
from llamaq.cli.common_options import AsJson, Queue, RedisUrl, WaitForJob
from llamaq.cli.job_options import with_job_options
from llamaq.producer import Client

PromptArgument = Annotated[str, typer.Argument(help="The text to continue. `-` reads it from standard input.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB_ID", help="The job id, as printed by `llamaq submit`.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("generate")(with_job_options(generate, without=("stream",)))
    app.command("chat")(with_job_options(chat, without=("stream",)))
    app.command("submit")(with_job_options(submit))
    for command in (stream, result, cancel, status):
        app.command(command.__name__)(command)


def generate(
    prompt: PromptArgument,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    wait_s: WaitForJob = None,
    as_json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Continue a text and print the new text as it is generated. With --json, print the result when it is complete."""
    text = _read_text(prompt)
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        if as_json:
            views.show_json(client.generate(text, **options))
        else:
            views.show_stream(client.stream(text, **options))


def chat(
    message: Annotated[
        str | None,
        typer.Argument(
            help="The user's message. `-` reads it from standard input. If not given, a terminal starts a conversation."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message that the chat begins with.")] = None,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    wait_s: WaitForJob = None,
    as_json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Send a message to a chat model and print the answer. On a terminal without MESSAGE, chat until Ctrl-D."""
    messages = [{"role": "system", "content": system}] if system else []
    with Client(redis_url, queue, timeout_s=wait_s) as client:
        if message is None and sys.stdin.isatty():
            converse(client, messages, options)
            return
        messages.append({"role": "user", "content": _read_text("-" if message is None else message)})
        if as_json:
            views.show_json(client.chat(messages, **options))
        else:
            views.show_stream(client.stream_chat(messages, **options))


def converse(client: Client, messages: list[dict[str, str]], options: dict[str, Any]) -> None:
    """Read messages from the terminal and print the answers until Ctrl-D. Each request has the whole conversation."""
    while True:
        try:
            message = typer.prompt(">", prompt_suffix=" ")
        except typer.Abort:
            typer.echo()
            return
        messages.append({"role": "user", "content": message})
        answer = views.show_stream(client.stream_chat(messages, **options))
        messages.append({"role": "assistant", "content": answer})


def submit(prompt: PromptArgument, redis_url: RedisUrl = None, queue: Queue = None, *, options: dict[str, Any]) -> None:
    """Put a job into the queue and print its id."""
    text = _read_text(prompt)
    with Client(redis_url, queue) as client:
        typer.echo(client.submit(text, **options).id)


def stream(job_id: JobArgument, redis_url: RedisUrl = None, wait_s: WaitForJob = None, as_json: AsJson = False) -> None:
    """Print the text of a job from its beginning, as it is generated. With --json, print one object per chunk."""
    with Client(redis_url, timeout_s=wait_s) as client:
        views.show_stream(client.job(job_id).stream(), as_json=as_json)


def result(job_id: JobArgument, redis_url: RedisUrl = None, wait_s: WaitForJob = None, as_json: AsJson = False) -> None:
    """Wait for a job to finish and print its text. With --json, print the whole result."""
    with Client(redis_url, timeout_s=wait_s) as client:
        found = client.job(job_id).result()
        if as_json:
            views.show_json(found)
        else:
            typer.echo(found.text)


def cancel(job_id: JobArgument, redis_url: RedisUrl = None) -> None:
    """Cancel a job."""
    with Client(redis_url) as client:
        typer.echo("cancelled" if client.cancel(job_id) else "the job had already ended")


def status(job_id: JobArgument, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Show the state of a job."""
    with Client(redis_url) as client:
        found = client.job(job_id).status()
        if as_json:
            views.show_json(found)
        else:
            views.show_status(found)


def _read_text(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument
