"""The public API as a web backend uses it. It is only type-checked, by test_typing.py, and never run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import assert_type

from llamaq.producer import (
    AsyncClient,
    AsyncJob,
    Chunk,
    Client,
    DeadLetter,
    DeadLetterDetails,
    Embedding,
    FinishReason,
    Job,
    JobFailed,
    JobStatus,
    JobSummary,
    Message,
    Priority,
    QueueDepth,
    QueueStats,
    Result,
    SlotFile,
    Stream,
    Worker,
    WorkerSlots,
)


def blocking(client: Client) -> Iterator[str]:
    result = client.generate("Once upon a time", max_tokens=64, temperature=0.7, stop=["\n"], timeout=10)
    assert_type(result, Result)
    assert_type(result.tokens, tuple[int, ...])
    assert_type(result.finish_reason, FinishReason)
    assert_type(result.stats.ttft_ms, float | None)
    for chunk in client.stream_chat([{"role": "user", "content": "hi"}], priority="bulk"):
        assert_type(chunk, Chunk)
        yield chunk.text
    job = client.submit(messages=[Message(role="user", content="hi")], priority=Priority.BULK, seed=None)
    assert_type(job, Job)
    assert_type(job.status(), JobStatus)
    assert_type(job.cancel(), bool)
    assert_type(job.stream(), Generator[Chunk, None, None])
    try:
        assert_type(client.job(job.id).result(timeout=60), Result)
    except JobFailed as exc:
        assert_type(exc.code, str)
    assert_type(client.generate_tokens([1, 2, 3]), Result)
    assert_type(client.chat([{"role": "user", "content": "hi"}]), Result)
    assert_type(client.embed(["one", "two"], dimensions=8, priority="bulk"), tuple[Embedding, ...])
    assert_type(client.embed([[1, 2], [3]], normalization="none"), tuple[Embedding, ...])
    assert_type(client.embed("one")[0].vector, list[float])
    assert_type(client.rerank("query", ["document"], top_n=1)[0].score, float)
    assert_type(client.stream_tokens([1, 2, 3]), Stream)
    assert_type(client.stream("x").text(), Generator[str, None, None])
    assert_type(client.stream("x").job.result(), Result)
    assert_type(client.cancel(job.id), bool)
    assert_type(client.jobs(state="queued", priority="interactive"), tuple[JobSummary, ...])
    assert_type(client.purge(priority="bulk"), tuple[str, ...])
    assert_type(client.queue_depth(), QueueDepth)
    assert_type(client.workers(), tuple[Worker, ...])
    assert_type(client.stats(), QueueStats)
    for letter in client.dead_letters():
        assert_type(letter, DeadLetter)
        assert_type(client.dead_letter(letter.id), DeadLetterDetails)
        assert_type(client.retry_dead_letter(letter.id), Job)
    assert_type(client.slots(), tuple[WorkerSlots, ...])
    assert_type(client.save_slot(0, "name"), SlotFile)
    assert_type(client.restore_slot(0, "name", worker="w"), SlotFile)
    assert_type(client.erase_slot(0, timeout=5), int)
    assert_type(client.tokenizer().encode("x"), list[int])
    assert_type(client.tokenizer().decode([1, 2]), str)


async def asynchronous(client: AsyncClient) -> AsyncIterator[str]:
    assert_type(await client.generate_tokens([1, 2, 3], json_schema={"type": "object"}), Result)
    assert_type(await client.chat([{"role": "user", "content": "hi"}], logit_bias={5: -1.0}), Result)
    async for chunk in await client.stream("Tell me a story", max_tokens=200, timeout=None):
        assert_type(chunk, Chunk)
        yield chunk.text
    job = await client.submit("x", metadata={"user": "u1"})
    assert_type(job, AsyncJob)
    assert_type(await job.result(), Result)
    assert_type(job.stream(), AsyncGenerator[Chunk, None])
    async for piece in client.job(job.id).stream():
        assert_type(piece.offset, int)


async def errors_that_a_type_checker_finds(client: AsyncClient) -> None:
    await client.generate("x", max_token=5)  # type: ignore[call-arg]
    await client.generate("x", temperature="hot")  # type: ignore[arg-type]
    await client.generate("x", priority="urgent")  # type: ignore[arg-type]
    await client.submit(text="x")  # type: ignore[call-arg]
    async for _ in client.stream("x"):  # type: ignore[attr-defined]
        pass


def errors_that_a_type_checker_finds_in_blocking_code(client: Client) -> None:
    client.generate("x", max_token=5)  # type: ignore[call-arg]
    client.stream_chat([{"role": "user", "content": "hi"}], priority="urgent")  # type: ignore[arg-type]
    client.save_slot("name", 0)  # type: ignore[arg-type]
