"""The commands for jobs: `generate`, `chat`, `submit`, `stream`, `result`, `cancel`, `priority` and `status`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from llamaq.cli import views
from llamaq.cli.answer_sources import Answers, AnswerStream, QueueAnswers, WholeAnswer
from llamaq.cli.common_options import ApiKey, AsJson, Queue, RedisUrl, RequireWorker, Server, WaitForJob
from llamaq.cli.exit_codes import EXIT_FAILED
from llamaq.cli.interactive_chat import Conversation
from llamaq.cli.job_options import with_job_options
from llamaq.cli.line_history import line_editing
from llamaq.common.errors import InvalidRequest, MissingExtra
from llamaq.common.protocol.keys import JobId
from llamaq.common.settings import client_settings
from llamaq.producer import Client, FinishReason, Job, JobState, NoWorker, Priority, Result

PromptArgument = Annotated[str, typer.Argument(help="The text to continue. `-` reads it from standard input.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB_ID", help="The job id, as printed by `llamaq submit`.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("generate")(with_job_options(generate, without=("stream",)))
    app.command("chat")(with_job_options(chat, without=("stream",)))
    app.command("submit")(with_job_options(submit))
    for command in (stream, result, cancel, priority, status):
        app.command(command.__name__)(command)


def generate(
    prompt: PromptArgument,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    wait_s: WaitForJob = None,
    require_worker: RequireWorker = None,
    server: Server = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Continue a text and print the new text as it is generated. With --json, print the result when it is complete."""
    text = _read_text(prompt)
    with open_answers(redis_url, queue, wait_s, require_worker, server, api_key) as answers:
        if as_json:
            _show_whole(answers.whole_text(text, options))
        else:
            _show_pieces(answers.stream_text(text, options))


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
    require_worker: RequireWorker = None,
    server: Server = None,
    api_key: ApiKey = None,
    history: Annotated[
        bool,
        typer.Option(
            "--history/--no-history", help="Keep the messages of conversations in a file, for the arrow keys."
        ),
    ] = True,
    as_json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Send a message to a chat model and print the answer. On a terminal without MESSAGE, chat until Ctrl-D.

    In a conversation, Ctrl-C during an answer ends the answer. Ctrl-C at the prompt ends the conversation.
    """
    messages = [{"role": "system", "content": system}] if system else []
    with open_answers(redis_url, queue, wait_s, require_worker, server, api_key) as answers:
        if message is None and sys.stdin and sys.stdin.isatty():
            with line_editing(keeps_history=history):
                Conversation(answers, messages, options).run()
            return
        messages.append({"role": "user", "content": _read_text("-" if message is None else message)})
        if as_json:
            _show_whole(answers.whole_chat(messages, options))
        else:
            _show_pieces(answers.stream_chat(messages, options))


def submit(
    prompt: PromptArgument,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    require_worker: RequireWorker = None,
    durable: Annotated[
        int, typer.Option(min=0, help="Wait, at most 2 s, until this many replicas of Redis have the job.")
    ] = 0,
    as_json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Put a job into the queue and print its id."""
    text = _read_text(prompt)
    with Client(redis_url, queue, require_worker=require_worker) as client:
        check_worker(client)
        job = client.submit(text, durable=durable, **options)
        if as_json:
            views.show_json_fields(job_id=job.id, is_new=job.is_new)
        else:
            typer.echo(job.id)


def stream(job_id: JobArgument, redis_url: RedisUrl = None, wait_s: WaitForJob = None, as_json: AsJson = False) -> None:
    """Print the text of a job from its beginning, as it is generated. With --json, print one object per chunk."""
    with _client_of(job_id, redis_url, wait_s) as client:
        job = client.job(job_id)
        _check_worker_of(client, job)
        views.show_stream(job.stream(), as_json=as_json)
        _check_reason(job.status().finish_reason)


def result(job_id: JobArgument, redis_url: RedisUrl = None, wait_s: WaitForJob = None, as_json: AsJson = False) -> None:
    """Wait for a job to finish and print its text. With --json, print the whole result."""
    with _client_of(job_id, redis_url, wait_s) as client:
        job = client.job(job_id)
        _check_worker_of(client, job)
        _show_result(job.result(), as_json=as_json)


def cancel(job_id: JobArgument, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Cancel a job."""
    with Client(redis_url) as client:
        is_cancelled = client.cancel(job_id)
        if as_json:
            views.show_json_fields(job_id=job_id, cancelled=is_cancelled)
        else:
            typer.echo("cancelled" if is_cancelled else "the job had already ended")


def priority(
    job_id: JobArgument,
    new_priority: Annotated[Priority, typer.Argument(metavar="PRIORITY", help="`interactive` or `bulk`.")],
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Change the priority of a waiting job. If this is not possible, the exit code is 1."""
    with Client(redis_url) as client:
        is_changed = client.job(job_id).set_priority(new_priority)
        if as_json:
            views.show_json_fields(job_id=job_id, priority=new_priority.value, changed=is_changed)
        elif is_changed:
            typer.echo(f"the priority is {new_priority}")
        if not is_changed:
            views.notice("the job runs or has ended, or was interrupted in a paused queue: it keeps its priority")
            raise typer.Exit(EXIT_FAILED)


def status(job_id: JobArgument, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Show the state of a job."""
    with Client(redis_url) as client:
        found = client.job(job_id).status()
        if as_json:
            views.show_json(found)
        else:
            views.show_status(found)


def open_answers(
    redis_url: str | None,
    queue: str | None,
    wait_s: float | None,
    require_worker: bool | None,
    server: str | None,
    api_key: str | None,
) -> Answers:
    """Return the answers of the queue, or those of the HTTP server if its URL is given.

    Raises:
        InvalidRequest: An option for Redis is given together with `--server`.
        MissingExtra: httpx is not installed, which `--server` needs.
        NoWorker: No worker serves the queue, and `require_worker` is set.
    """
    if server is None:
        client = Client(redis_url, queue, timeout_s=wait_s, require_worker=require_worker)
        check_worker(client)
        return QueueAnswers(client)
    if redis_url is not None or require_worker is not None:
        raise InvalidRequest("--server: leave out --redis-url and --require-worker; the server has its own settings")
    try:
        from llamaq.cli.http_answer_source import ServerAnswers
    except ModuleNotFoundError as exc:
        if exc.name != "httpx":
            raise
        raise MissingExtra("--server", "http") from exc
    return ServerAnswers(server, api_key, queue, client_settings(timeout_s=wait_s).timeout_s)


def check_worker(client: Client) -> None:
    """Print a notice if no worker serves the client's queue.

    Raises:
        NoWorker: No worker serves the queue, and the client has `require_worker`.
    """
    if client.workers():
        return
    missing = NoWorker(client.queue)
    if client.settings.require_worker:
        raise missing
    views.notice(f"{missing} (the job waits for a worker; `llamaq queues` lists all queues)")


def _client_of(job_id: str, redis_url: str | None, wait_s: float | None) -> Client:
    """Return a client of the queue that the id of the job names."""
    return Client(redis_url, JobId.parse(job_id).queue, timeout_s=wait_s)


def _check_worker_of(client: Client, job: Job) -> None:
    """Print a notice if the job waits and no worker serves its queue."""
    if job.status().state is JobState.QUEUED:
        check_worker(client)


def _show_result(found: Result, *, as_json: bool) -> None:
    if as_json:
        views.show_json(found)
    else:
        typer.echo(found.text)
    _check_reason(found.finish_reason)


def _show_whole(answer: WholeAnswer) -> None:
    typer.echo(answer.json)
    _check_reason(answer.finish_reason)


def _show_pieces(stream: AnswerStream) -> None:
    """Print each piece as it arrives. Ctrl-C cancels the job."""
    with stream:
        for piece in stream:
            typer.echo(piece, nl=False)
        typer.echo()
        _check_reason(stream.finish_reason())


def _check_reason(reason: FinishReason | None) -> None:
    """Fail if the text of an ended job is incomplete."""
    if reason in views.UNFINISHED:
        views.notice(views.UNFINISHED[reason])
        raise typer.Exit(EXIT_FAILED)


def _read_text(argument: str) -> str:
    return read_stdin() if argument == "-" else argument


def read_stdin() -> str:
    """Return the text of standard input. Raises `InvalidRequest` if it is closed or is not text."""
    if sys.stdin is None:
        raise InvalidRequest("standard input is closed: give the text as an argument")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"standard input: the text is not {exc.encoding}") from exc
