"""Jobs with retries: after a temporary failure, the job continues later with its next token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.job_claims import worker_queue
from tests.support.worker_scripts import worker_scripts
from tests.worker.broker.test_later import counts, ignore, make_due, sweep_until_due
from tests.worker.broker.test_suspects import BytePreparer, until, working

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats
from llamaq.common.protocol.script_types import Attempt
from llamaq.producer import AsyncClient, AsyncJob, JobFailed
from llamaq.producer.streaming.poll_schedule import PollSchedule
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker.deadline_sweep import DeadlineSweep
from llamaq.worker.broker.job_progress import JobProgress
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.core.outputs import JobEnded

BROKEN = JobRejected(ErrorCode.DECODE_FAILED, "no room")


@asynccontextmanager
async def sweeping(client: AsyncClient) -> AsyncIterator[None]:
    """Let jobs begin to wait when they are due, as every worker does."""
    task = asyncio.create_task(DeadlineSweep(worker_queue(client), on_reply=ignore).run())
    yield
    await cancel_tasks(task)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_job_is_retried_after_its_tokens_and_becomes_a_dead_letter_after_the_last_retry(
    redis_url: str, queue: str, streams: bool
) -> None:
    async with AsyncClient(redis_url, queue) as client, sweeping(client), working(redis_url, queue) as worker:
        job = await client.submit("x", retries=1, stream=streams)
        for n_tokens in (2, 3):
            await until(lambda: job.id in worker.admitted)
            running = worker.admitted[job.id]
            assert running.generated_before == [65, 65][: n_tokens - 2 and 2]
            for _ in range(n_tokens - len(running.generated_before)):
                worker.generate(job)
            del worker.admitted[job.id]
            worker.outputs.put([JobEnded(running, JobStats(), error=BROKEN, text="held back")])
        with pytest.raises(JobFailed, match="no room") as failed:
            await job.result(timeout=20)
        assert failed.value.code == "decode_failed"
        (letter,) = await client.dead_letters()
        assert (letter.job_id, letter.reason) == (job.id, "decode_failed after the last retry: no room")
        details = await client.dead_letter(letter.id)
        assert details.tokens == (65, 65, 65)
        again = await client.retry_dead_letter(letter.id)
        await until(lambda: again.id in worker.admitted)
        worker.end(again)
        assert (await again.result(timeout=20)).finish_reason is FinishReason.STOP
        assert await client.dead_letters() == ()


async def test_a_retried_stream_has_no_gap_and_no_repeat(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, sweeping(client), working(redis_url, queue) as worker:
        stream = await client.stream("x", retries=3, timeout=20)
        await until(lambda: worker.admitted)
        (running,) = worker.admitted.values()
        job = client.job(running.id)
        worker.generate(job)
        del worker.admitted[job.id]
        worker.outputs.put([JobEnded(running, JobStats(), error=BROKEN, text="held back")])
        await until(lambda: job.id in worker.admitted)
        assert (await job.status()).retries_left == 2
        worker.generate(job, 66)
        worker.end(job)
        chunks = [chunk async for chunk in stream]
        assert [token for chunk in chunks for token in chunk.tokens] == [65, 66]
        assert "held back" not in "".join(chunk.text for chunk in chunks)
        assert await client.dead_letters() == ()


async def test_a_job_that_could_not_be_prepared_is_retried(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, failures = BytePreparer.prepare, [OSError("out of threads")]

    def fail_once(self: BytePreparer, *args: Any) -> Any:
        if failures:
            raise failures.pop()
        return prepare(self, *args)

    monkeypatch.setattr(BytePreparer, "prepare", fail_once)
    async with AsyncClient(redis_url, queue) as client, sweeping(client), working(redis_url, queue) as worker:
        job = await client.submit("x", retries=1)
        await until(lambda: job.id in worker.admitted)
        status = await job.status()
        assert (status.retries_left, status.last_error and status.last_error.code) == (0, "internal")
        worker.end(job)
        assert (await job.result(timeout=20)).finish_reason is FinishReason.STOP


async def test_a_job_without_retries_fails_at_once_and_is_no_dead_letter(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, working(redis_url, queue) as worker:
        job = await client.submit("x")
        await until(lambda: job.id in worker.admitted)
        worker.outputs.put([JobEnded(worker.admitted.pop(job.id), JobStats(), error=BROKEN)])
        with pytest.raises(JobFailed):
            await job.result(timeout=20)
        assert await client.dead_letters() == ()


async def test_a_stopping_worker_leaves_a_failed_job_for_a_retry(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        async with working(redis_url, queue) as worker:
            job = await client.submit("x", retries=1)
            await until(lambda: job.id in worker.admitted)
            worker.outputs.put([JobEnded(worker.admitted.pop(job.id), JobStats(), error=BROKEN)])
        status = await job.status()
        assert (status.state, status.retries_left) == (JobState.QUEUED, 0)
        depth = await client.queue_depth()
        assert (depth.waiting + depth.delayed, depth.running) == (1, 0)


async def test_an_attempt_that_fails_is_retried_later_and_a_stale_worker_cannot_retry_it(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x", retries=2)
        error = Failed(code=ErrorCode.INTERNAL, message="broken")
        delay: dict[str, Any] = {"first_delay_s": 1, "max_delay_s": 1.8, "share": 0.5}
        for delay_ms in (500, 900):
            attempt = await worker.start_next()
            found = [await worker_scripts(worker).retry(attempt.increment(), error, **delay) for _ in range(2)]
            assert found == [delay_ms, None]
            assert (await attempt.emit([1], "a")).code == "lost"
            assert await counts(client) == (0, 0, 1)
            status = await job.status()
            assert (status.state, status.last_error) == (JobState.QUEUED, error)
            await make_due(client, job)
            await sweep_until_due(worker)
        attempt = await worker.start_next()
        assert await worker_scripts(worker).retry(attempt.increment(), error, **delay) is None
        assert (await job.status()).retries_left == 0


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_waits_gives_a_retried_job_its_entry_without_a_worker(
    redis_url: str, queue: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PollSchedule, "pop_due", lambda *_: [])  # no poll after a silence
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x", retries=1, stream=streams)
        waiting = asyncio.create_task(read_all(job) if streams else read_result(job))
        attempt = await worker.start_next()
        await until(lambda: client.connection.subscriber.n_confirmed == 1)
        error = Failed(code=ErrorCode.INTERNAL, message="broken")
        delay: dict[str, Any] = {"first_delay_s": 0.1, "max_delay_s": 0.1, "share": 1}
        await worker_scripts(worker).retry(attempt.increment(), error, **delay)
        again = await worker.start_next()  # no worker runs `due.lua`
        await again.answer(["a"])
        assert await waiting == "a"


async def read_all(job: AsyncJob) -> str:
    return "".join([chunk.text async for chunk in job.stream(timeout=60)])


async def read_result(job: AsyncJob) -> str:
    return (await job.result(timeout=60)).text


async def test_a_cancelled_job_is_not_retried(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x", retries=2)
        attempt = await worker.start_next()
        await attempt.emit([1], "a")
        await job.cancel()
        error = Failed(code=ErrorCode.INTERNAL, message="broken")
        last = attempt.increment()
        assert await worker_scripts(worker).retry(last, error, first_delay_s=1, max_delay_s=1, share=1) is None
        result = await job.result(timeout=60)
        assert (result.finish_reason, result.tokens) == (FinishReason.CANCELLED, (1,))


@pytest.mark.parametrize(
    ("code", "retries_left", "is_retried", "is_dead"),
    [
        (ErrorCode.INTERNAL, 1, True, False),
        (ErrorCode.DECODE_FAILED, 0, False, True),
        (ErrorCode.DECODE_FAILED, None, False, False),
        (ErrorCode.INVALID_GRAMMAR, 1, False, False),
    ],
)
def test_only_failures_that_may_pass_are_retried(
    code: ErrorCode, retries_left: int | None, is_retried: bool, is_dead: bool
) -> None:
    lease: Any = None
    attempt = Attempt(1, b"", 0, 0.0, None, 0.0, None, retries_left)
    progress = JobProgress(lease, attempt, JobTimes())
    assert progress.plan_retry(JobRejected(code, "broken")) is is_retried
    if not is_retried:
        progress.fail(JobRejected(code, "broken"))
        assert progress.terminal_write is not None
        assert bool(progress.terminal_write.dead_reason) is is_dead
