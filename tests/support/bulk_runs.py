"""Bulk runs of rows in a folder, and a fake worker that answers them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import AsyncClient
from llamaq.producer.bulk import BulkRun
from llamaq.producer.testing import FakeWorker


class Rows:
    """A folder with the files of a run."""

    def __init__(self, folder: Path, *rows: object) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        self.input.write_text("".join(f"{line}\n" for line in lines))
        self.run = BulkRun(input=self.input, output=self.output)

    def with_fields(self, **fields: Any) -> BulkRun:
        """Return the run with other fields, validated."""
        return BulkRun(**{**dict(self.run), **fields})

    def answers(self) -> list[Any]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def errors(self) -> list[Any]:
        return [json.loads(line) for line in self.run.error_file.read_text().splitlines()]


class Answers:
    """A fake worker that answers each prompt with itself, and notes the prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, request: JobRequest) -> list[str]:
        prompt = request.prompt or (request.messages[-1].content if request.messages else "")
        self.prompts.append(prompt)
        return ["re: ", prompt]


@asynccontextmanager
async def serving(client: AsyncClient) -> AsyncIterator[Answers]:
    """Answer the jobs of the client's queue within this context."""
    answers = Answers()
    async with FakeWorker(client.settings.redis_url, client.queue) as worker:
        task = asyncio.create_task(worker.serve(answers))
        yield answers
        await cancel_tasks(task)


@asynccontextmanager
async def served_client(url: str, queue: str) -> AsyncIterator[tuple[AsyncClient, Answers]]:
    """Yield a client of a queue, and the fake worker that answers its jobs."""
    async with AsyncClient(url, queue) as client, serving(client) as answers:
        yield client, answers


def texts(answers: list[Any]) -> list[tuple[int, str]]:
    """Return the line and the text of each answer."""
    return [(answer["line"], answer["text"]) for answer in answers]


EXPECTED = [(n, f"re: prompt {n}") for n in range(1, 31)]
"""Lines and texts of the answers to the fixture `rows`."""
