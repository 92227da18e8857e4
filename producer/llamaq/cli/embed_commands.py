"""The commands `embed` and `rerank`, for queues whose workers run with `--embeddings`."""

from __future__ import annotations

from io import StringIO
from typing import Annotated

import typer

from llamaq.cli import views
from llamaq.cli.common_options import AsJson, Queue, RedisUrl, RequireWorker, WaitForJob
from llamaq.cli.job_commands import read_stdin
from llamaq.common.errors import InvalidRequest
from llamaq.producer import Client

Texts = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT", help="The texts. Without one, each line of standard input is a text."),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("embed")(embed)
    app.command("rerank")(rerank)


def embed(
    texts: Texts = None,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    wait_s: WaitForJob = None,
    require_worker: RequireWorker = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Number of values of each embedding to print, from the first on.")
    ] = None,
    _: AsJson = True,
) -> None:
    """Print the embedding of each text as a line of JSON, on a queue whose workers run with --embeddings."""
    with Client(redis_url, queue, timeout_s=wait_s, require_worker=require_worker) as client:
        for index, embedding in enumerate(client.embed(_texts(texts), dimensions=dimensions)):
            vector = embedding.vectors if embedding.n_rows > 1 else embedding.vector
            views.show_json_fields(index=index, n_tokens=embedding.n_tokens, embedding=vector)


def rerank(
    query: Annotated[str, typer.Argument(help="The query.")],
    documents: Texts = None,
    redis_url: RedisUrl = None,
    queue: Queue = None,
    wait_s: WaitForJob = None,
    require_worker: RequireWorker = None,
    top_n: Annotated[int | None, typer.Option(min=1, help="Largest number of documents to print.")] = None,
    _: AsJson = True,
) -> None:
    """Print documents with their scores for a query, the best first, as lines of JSON. Needs --pooling rank."""
    given = _texts(documents)
    with Client(redis_url, queue, timeout_s=wait_s, require_worker=require_worker) as client:
        for one in client.rerank(query, given, top_n=top_n):
            views.show_json_fields(index=one.index, score=one.score, text=given[one.index])


def _texts(given: list[str] | None) -> list[str]:
    texts = given or [line.rstrip("\n") for line in StringIO(read_stdin())]
    if not texts:
        raise InvalidRequest("TEXT: at least one text is required, as an argument or as a line of standard input")
    return texts
