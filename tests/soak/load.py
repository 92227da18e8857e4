"""The load of a soak: submits jobs and reads them as a web backend does, and passes all events to the checker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.exceptions import RedisError
from tests.soak.chaos import JobShape
from tests.soak.checker import STORED, Checker
from tests.soak.environment import POLL_S

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import JobFailed, JobNotFound, LlamaqError, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Failed, Finished, Tokens
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.job_request import Priority
from llamaq.producer import AsyncClient, AsyncJob

WIRE = "wire"
"""Name of the reader that receives the pub/sub messages of all jobs without llamaq's client."""
JOBS_PER_READ = 200
DRAIN_S = 20.0


async def submit(client: AsyncClient, checker: Checker, shape: JobShape) -> AsyncJob:
    """Submit a job and record it in the checker."""
    job = await client.submit(**shape.options)
    checker.accept(job.id, **shape.demands)
    return job


async def read(job: AsyncJob, checker: Checker, reader: str) -> None:
    """Read the whole stream of a job, and record each event and error in the checker."""
    checker.record_start(reader, job.id)
    n_chars = 0
    try:
        async for chunk in job.stream():
            event = Tokens(offset=chunk.offset, tokens=chunk.tokens, text_offset=n_chars, text=chunk.text)
            checker.record_event(reader, job.id, event)
            n_chars += len(chunk.text)
    except JobFailed as exc:
        checker.record_event(reader, job.id, Failed(code=exc.code, message=exc.message))
    except (LlamaqError, RedisError, OSError) as exc:
        checker.add_violation(f"{job.id} {reader}: {exc!r}")
    else:
        # A stream ends without an error only after a terminal event. Its finish reason is not compared.
        checker.record_event(reader, job.id, Finished(finish_reason=FinishReason.STOP, stats=JobStats()))


async def run_job(client: AsyncClient, checker: Checker, shape: JobShape) -> AsyncJob:
    """Submit a job, and let all its readers read it to the end."""
    job = await submit(client, checker, shape)
    handles = [job, *(client.job(job.id) for _ in range(shape.n_readers - 1))]
    await asyncio.gather(*(read(one, checker, f"reader {number}") for number, one in enumerate(handles)))
    return job


async def run_jobs(
    begin: Callable[[], Coroutine[Any, Any, object]], *, width: int, wants_more: Callable[[int, int], bool]
) -> None:
    """Keep up to `width` jobs open. Returns when no job is open and `wants_more` returns False.

    Args:
        begin: Submits a job and returns when the job has ended.
        width: Largest number of open jobs.
        wants_more: Called with the number of jobs begun so far and of open jobs. Returns whether to begin another job.
    """
    open_jobs: set[asyncio.Task[object]] = set()
    n_begun = 0
    try:
        while True:
            while len(open_jobs) < width and wants_more(n_begun, len(open_jobs)):
                open_jobs.add(asyncio.create_task(begin()))
                n_begun += 1
            if not open_jobs:
                return
            done, open_jobs = await asyncio.wait(open_jobs, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
    finally:
        await cancel_tasks(*open_jobs)


async def run_with_background(background: Coroutine[Any, Any, object], work: Coroutine[Any, Any, object]) -> None:
    """Run `work` until it returns, with `background` running beside it. If one of them raises, raises that error."""
    tasks = [asyncio.create_task(background), asyncio.create_task(work)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        await cancel_tasks(*tasks)


@asynccontextmanager
async def record_published(client: AsyncClient, checker: Checker) -> AsyncIterator[None]:
    """While the context is entered, pass all messages that the jobs of the queue publish to the checker."""
    channel = client.keys.of_job(f"{client.queue}.0.{32 * '0'}").channel
    pattern = channel.rpartition(":")[0] + ":*"
    tap: Any = client.redis.pubsub()
    await tap.psubscribe(pattern)

    async def listen() -> None:
        async for message in tap.listen():
            if message["type"] == "pmessage":
                job_id = message["channel"].decode().rpartition(":")[2]
                checker.record_start(WIRE, job_id, is_whole=False)
                checker.record_event(WIRE, job_id, codec.decode_event(message["data"]))

    listening = asyncio.create_task(listen())
    try:
        yield
    finally:
        await cancel_tasks(listening)
        await tap.aclose()


async def collect(client: AsyncClient, checker: Checker) -> None:
    """Pass to the checker the stored events and results of all accepted jobs, and the entries left in the queue."""
    job_ids = list(checker.accepted)
    left = await _left_in_queue(client)
    for start in range(0, len(job_ids), JOBS_PER_READ):
        some = job_ids[start : start + JOBS_PER_READ]
        async with client.redis.pipeline(transaction=False) as pipe:
            for job_id in some:
                pipe.xrange(client.keys.of_job(job_id).events)
            for job_id, entries in zip(some, await pipe.execute(), strict=True):
                _record_stored_events(checker, job_id, entries)
        await asyncio.gather(*(_record_result(client, checker, job_id) for job_id in some))
    if left:
        checker.add_violation(f"{left} entries remain in the queue")


async def _left_in_queue(client: AsyncClient) -> int:
    """Return the number of entries in the job streams.

    Waits up to `DRAIN_S` for them to become empty, because jobs whose submit was not acknowledged may still run.
    """
    deadline_s = time.monotonic() + DRAIN_S
    while True:
        lengths = [await client.redis.xlen(client.keys.jobs(client.queue, 0, priority)) for priority in Priority]
        if not any(lengths) or time.monotonic() > deadline_s:
            return sum(lengths)
        await asyncio.sleep(POLL_S)


def _record_stored_events(checker: Checker, job_id: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
    checker.record_start(STORED, job_id, is_whole=False)  # the end of a job drops its `tokens` events
    for entry_id, fields in entries:
        try:
            checker.record_event(STORED, job_id, codec.decode_event(fields[b"e"]))
        except ProtocolError as exc:
            checker.add_violation(f"{job_id}: event {entry_id.decode()}: {exc}")


async def _record_result(client: AsyncClient, checker: Checker, job_id: str) -> None:
    if not any(isinstance(end, Finished) for end in checker.ends_of(job_id)):
        return
    with suppress(JobFailed):
        try:
            checker.record_result(job_id, await client.job(job_id).result())
        except JobNotFound:
            checker.add_violation(f"{job_id}: has finished, but has no result")
