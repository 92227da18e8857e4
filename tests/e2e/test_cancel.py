"""A cancelled job ends once, with the tokens generated so far. Jobs are cancelled in every state and in every way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis
from tests.support.workers import only_worker

from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.common.protocol.keys import JobId, Keys
from llamaq.common.protocol.queue_and_worker_state import SlotSnapshot
from llamaq.producer import AsyncClient, Client, JobNotFound, ResultTimeout
from llamaq.producer.sync import Job

if TYPE_CHECKING:
    from tests.e2e.conftest import Await, ServedQueue

LONG_PROMPT = [7] * 30_000
"""A prompt whose prefill takes tens of seconds on the slow worker."""
LONG = 8000
"""Number of tokens whose generation takes tens of seconds on the slow worker."""


@pytest.fixture(autouse=True)
def wait_until_idle(slow_client: Client, wait_for: Await) -> Iterator[None]:
    """Wait after each test until no job is in the queue or in a slot, and no KV cell is reserved."""
    yield
    wait_for(lambda: is_idle(slow_client))


def is_idle(client: Client) -> bool:
    depth = client.queue_depth()
    workers = client.workers()  # none, if a heartbeat is late on a busy machine
    n_busy = sum(worker.cache.reserved_cells + len(job_ids(worker.slots)) for worker in workers)
    return bool(workers) and depth.waiting + depth.running + n_busy == 0


def job_ids(slots: tuple[SlotSnapshot, ...]) -> list[str]:
    return [slot.job_id for slot in slots if slot.job_id is not None]


def slot_of(client: Client, job: Job) -> SlotSnapshot | None:
    """Return the slot of the job according to the last heartbeat, or None if the job has no slot."""
    return next((slot for slot in only_worker(client).slots if slot.job_id == job.id), None)


def newest_job(client: Client, served: ServedQueue) -> Job:
    """Return the job that was submitted last, by the field `submitted_ms` of the job hashes."""
    with Redis.from_url(served.url) as redis:
        hashes = redis.scan_iter(Keys().of_job(str(JobId.new(served.queue))).job.rpartition(served.queue)[0] + "*")
        newest: Any = max(hashes, key=lambda key: int(redis.hget(key, "submitted_ms") or 0))
    return client.job(newest.decode().rpartition(":")[2])


def test_a_cancelled_job_in_the_queue_ends_at_once_and_never_starts(
    slow: ServedQueue, slow_client: Client, wait_for: Await
) -> None:
    n_claimed = slow.settings.n_parallel + slow.settings.inbox_window
    blockers = [slow_client.submit("the world", max_tokens=LONG) for _ in range(n_claimed)]
    wait_for(lambda: all(blocker.status().attempt for blocker in blockers))
    waiting = slow_client.submit("the world", max_tokens=5)
    assert waiting.cancel()
    result = waiting.result(timeout=5)
    assert (result.finish_reason, result.tokens, result.text) == (FinishReason.CANCELLED, (), "")
    assert waiting.status().attempt == 0
    for blocker in blockers:
        assert blocker.cancel()


def test_a_claimed_job_without_a_slot_is_cancelled(slow: ServedQueue, slow_client: Client, wait_for: Await) -> None:
    running = [slow_client.submit("the world", max_tokens=LONG) for _ in range(slow.settings.n_parallel)]
    wait_for(lambda: all(slot_of(slow_client, job) for job in running))
    claimed = slow_client.submit("the world", max_tokens=5)
    wait_for(lambda: claimed.status().attempt)
    assert claimed.status().state is JobState.QUEUED
    assert claimed.cancel()
    assert claimed.status().finish_reason is FinishReason.CANCELLED, "it ends at once"
    for job in running:
        job.cancel()


def test_a_job_in_prefill_is_cancelled_without_a_token(slow_client: Client, wait_for: Await) -> None:
    job = slow_client.submit(tokens=LONG_PROMPT, max_tokens=5)
    slot = wait_for(lambda: (slot := slot_of(slow_client, job)) and slot.prefilled_tokens and slot)
    assert slot.state == "prefill"
    assert slot.prefilled_tokens < len(LONG_PROMPT)
    assert job.cancel()
    result = job.result(timeout=5)
    assert (result.finish_reason, result.tokens) == (FinishReason.CANCELLED, ())
    assert result.stats.prompt_tokens == len(LONG_PROMPT)
    assert result.stats.ttft_ms is None


def test_a_job_in_decode_is_cancelled_and_keeps_its_tokens(slow_client: Client) -> None:
    job = slow_client.submit("the world", max_tokens=LONG)
    chunks = job.stream()
    seen = list(islice(chunks, 5))
    assert job.cancel()
    seen += chunks
    result = job.result(timeout=5)
    assert result.finish_reason is FinishReason.CANCELLED
    assert 5 <= len(result.tokens) < LONG
    assert result.text == "".join(chunk.text for chunk in seen)
    assert result.tokens == tuple(token for chunk in seen for token in chunk.tokens)


def test_other_jobs_of_the_batch_continue_after_a_cancel(slow_client: Client) -> None:
    doomed = slow_client.submit("the world", max_tokens=LONG, temperature=0)
    neighbour = slow_client.submit("the world", max_tokens=120, temperature=0)
    next(doomed.stream())
    doomed.cancel()
    assert neighbour.result(timeout=30).stats.generated_tokens == 120
    assert doomed.result(timeout=5).finish_reason is FinishReason.CANCELLED


def test_a_job_that_has_ended_is_not_cancelled(slow_client: Client) -> None:
    job = slow_client.submit("the world", max_tokens=3)
    before = job.result(timeout=30)
    assert not job.cancel()
    assert job.result() == before
    assert before.finish_reason is FinishReason.LENGTH


def test_cancelling_twice_ends_a_job_once(slow_client: Client, slow: ServedQueue) -> None:
    job = slow_client.submit("the world", max_tokens=LONG)
    next(job.stream())
    for _ in range(5):
        job.cancel()
    assert job.result(timeout=5).finish_reason is FinishReason.CANCELLED
    with Redis.from_url(slow.url) as redis:
        entries: Any = redis.xrange(Keys().of_job(job.id).events)
    assert sum(b"finished" in fields[b"e"] for _, fields in entries) == 1


def test_cancelling_an_unknown_job_is_an_error(slow_client: Client, slow: ServedQueue) -> None:
    with pytest.raises(JobNotFound):
        slow_client.cancel(str(JobId.new(slow.queue)))


# ---- readers that disconnect


def test_a_job_whose_reader_disconnects_is_cancelled(slow_client: Client, wait_for: Await) -> None:
    job = slow_client.submit("the world", max_tokens=LONG, cancel_on_disconnect=True)
    chunks = job.stream()
    next(chunks)
    chunks.close()
    # `status` does not subscribe: subscribing would count as a reader.
    status = wait_for(lambda: (status := job.status()).state is JobState.FINISHED and status)
    assert status.finish_reason is FinishReason.CANCELLED


def test_a_job_that_never_had_a_reader_is_cancelled(slow_client: Client, wait_for: Await) -> None:
    job = slow_client.submit("the world", max_tokens=LONG, cancel_on_disconnect=True)
    status = wait_for(lambda: (status := job.status()).state is JobState.FINISHED and status)
    assert status.finish_reason is FinishReason.CANCELLED


def test_a_job_without_cancel_on_disconnect_needs_no_reader(slow_client: Client, slow: ServedQueue) -> None:
    job = slow_client.submit("the world", max_tokens=LONG)
    watched = slow_client.submit("the world", max_tokens=LONG, cancel_on_disconnect=True)
    begun_ms = None
    for chunk in watched.stream():
        status = watched.status()
        begun_ms = begun_ms or status.started_ms
        if chunk.offset > 0 and elapsed_s(slow, begun_ms) > 3 * slow.settings.disconnect_s:
            break
    assert job.status().state is JobState.RUNNING, "a job without cancel_on_disconnect was cancelled"
    assert watched.status().state is JobState.RUNNING, "a job with a reader was cancelled"
    assert job.cancel()
    assert watched.cancel()


def elapsed_s(served: ServedQueue, since_ms: int | None) -> float:
    """Return the seconds since `since_ms`, by the clock of Redis."""
    assert since_ms is not None
    with Redis.from_url(served.url) as redis:
        seconds, microseconds = redis.time()
    return float(seconds) + float(microseconds) / 1e6 - since_ms / 1000


# ---- callers that stop waiting


def test_a_generate_call_that_times_out_cancels_its_job(slow_client: Client, wait_for: Await) -> None:
    with pytest.raises(ResultTimeout) as given_up:
        slow_client.generate("the world", max_tokens=LONG, timeout=2)
    named = re.search(r"\S+\.0\.[0-9a-f]{32}", str(given_up.value))
    assert named
    job = slow_client.job(named[0])
    wait_for(lambda: job.status().finish_reason is FinishReason.CANCELLED)


def test_a_result_call_that_times_out_does_not_cancel_its_job(slow_client: Client, wait_for: Await) -> None:
    job = slow_client.submit("the world", max_tokens=LONG)
    wait_for(lambda: job.status().state is JobState.RUNNING)
    with pytest.raises(ResultTimeout):
        job.result(timeout=0.2)
    assert job.status().state is JobState.RUNNING
    assert not job.status().cancel_requested
    job.cancel()


def test_a_stream_closed_early_cancels_its_job(slow: ServedQueue, slow_client: Client, wait_for: Await) -> None:
    chunks = slow_client.stream("the world", max_tokens=LONG)
    next(chunks)
    job = newest_job(slow_client, slow)
    assert job.status().state is JobState.RUNNING
    chunks.close()
    wait_for(lambda: job.status().finish_reason is FinishReason.CANCELLED)


def test_a_stream_of_a_job_can_be_closed_and_opened_again(slow_client: Client) -> None:
    job = slow_client.submit("the world", max_tokens=150)
    first = list(islice(job.stream(), 3))
    again = list(slow_client.job(job.id).stream())
    assert "".join(chunk.text for chunk in again) == job.result().text
    assert again[0].text.startswith(first[0].text)
    assert job.result().finish_reason is FinishReason.LENGTH


async def test_a_cancelled_task_cancels_its_job_on_the_async_client(
    slow: ServedQueue, slow_client: Client, wait_for: Await
) -> None:
    async with AsyncClient(slow.url, slow.queue) as client:
        task = asyncio.create_task(client.generate("the world", max_tokens=LONG))
        await asyncio.to_thread(wait_for, lambda: slow_client.queue_depth().running)
        job = newest_job(slow_client, slow)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    wait_for(lambda: job.status().finish_reason is FinishReason.CANCELLED)


async def test_a_stream_closed_early_cancels_its_job_on_the_async_client(
    slow: ServedQueue, slow_client: Client, wait_for: Await
) -> None:
    async with AsyncClient(slow.url, slow.queue) as client:
        chunks = await client.stream("the world", max_tokens=LONG)
        await anext(chunks)
        job = newest_job(slow_client, slow)
        await chunks.aclose()
    wait_for(lambda: job.status().finish_reason is FinishReason.CANCELLED)
