"""Each job is counted once, in the script that ends it, however it ends and however often the script is called."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
from tests.support.fake_redis import url_of_each_server
from tests.support.worker_scripts import worker_scripts

import llamaq.common.protocol
from llamaq.common.errors import ErrorCode
from llamaq.common.metrics import metric_definitions as f
from llamaq.common.metrics.buckets import JOB_TIMES_MS, LENGTHS_TOKENS
from llamaq.common.metrics.job_counters import add_job_counters, sum_partitions
from llamaq.common.metrics.metric_definitions import Family, Histogram, Samples
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Failed, Finished
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.script_types import TerminalWrite
from llamaq.producer import AsyncClient
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeWorker

FINISHED = TerminalWrite(
    Finished(finish_reason=FinishReason.STOP, stats=JobStats()),
    {"finish_reason": "stop", "generated": "5", "token_times": "40 90 10=3 30=1", "usage": "300 200 100 device"},
)


redis_url = url_of_each_server


async def samples_of(worker: FakeWorker) -> Samples:
    stored: Any = await worker.redis.hgetall(worker.keys.metrics(worker.queue, 0))
    samples = Samples()
    add_job_counters(samples, worker.queue, sum_partitions([stored]))
    return samples


def count_of(samples: Samples, family: Family, *labels: str) -> float:
    """Return a counter, or the number of values in a histogram."""
    (value,) = [value for names, value in samples.values[family].items() if names[1:] == labels]
    return sum(value.counts) if isinstance(value, Histogram) else value


def sum_of(samples: Samples, family: Family, priority: str = "interactive") -> float:
    (value,) = [value for names, value in samples.values[family].items() if names[1] == priority]
    assert isinstance(value, Histogram)
    return value.total


async def start(client: AsyncClient, worker: FakeWorker, **options: Any) -> FakeAttempt:
    await client.submit("hello", **options)
    return await worker.start_next()


def test_lua_and_python_have_the_same_buckets() -> None:
    source = files(llamaq.common.protocol).joinpath("scripts/_metrics.lua").read_text()
    (bounds,) = re.findall(r"JOB_TIMES_MS = \{([\d,\s]+)\}", source)
    assert tuple(map(int, bounds.split(","))) == JOB_TIMES_MS
    assert f"MAX_LENGTH_BOUND = {LENGTHS_TOKENS[-1]}\n" in source


async def test_a_finish_that_is_sent_twice_counts_the_job_once(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        attempt = await start(client, worker)
        for _ in range(2):
            await worker.scripts.finish(attempt.increment(), FINISHED)
        samples = await samples_of(worker)
    assert count_of(samples, f.JOBS_ENDED, "interactive", "finished", "stop") == 1
    assert count_of(samples, f.JOBS_SUBMITTED, "interactive") == 1
    assert count_of(samples, f.ATTEMPTS) == 1
    for family in (f.JOB_DURATION, f.QUEUE_WAIT, f.TIME_TO_FIRST_TOKEN, f.PROMPT_LENGTH, f.OUTPUT_LENGTH):
        assert count_of(samples, family, "interactive") == 1, family.name
        assert count_of(samples, family, "bulk") == 0, family.name
    assert sum_of(samples, f.TIME_TO_FIRST_TOKEN) == 0.04
    assert (count_of(samples, f.INTER_TOKEN, "interactive"), sum_of(samples, f.INTER_TOKEN)) == (4, 0.05)
    assert (sum_of(samples, f.PROMPT_LENGTH), count_of(samples, f.PROMPT_TOKENS, "interactive")) == (300, 300)
    assert (sum_of(samples, f.OUTPUT_LENGTH), count_of(samples, f.GENERATED_TOKENS, "interactive")) == (5, 5)
    assert count_of(samples, f.COMPUTED_TOKENS, "interactive") == 200
    assert count_of(samples, f.CACHED_TOKENS, "interactive", "device") == 100
    assert count_of(samples, f.CACHE_LOOKUPS, "interactive", "device") == 1


@pytest.mark.parametrize(
    ("usage", "counted"),
    [("300 300 0 none", {"computed": 300, "lookups:none": 1}), ("300 0 0 unused", {}), ("300 0 0", {})],
)
async def test_only_a_prompt_with_a_slot_was_looked_up_and_only_a_hit_has_cached_tokens(
    redis_url: str, queue: str, usage: str, counted: dict[str, int]
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        attempt = await start(client, worker)
        write = replace(FINISHED, fields={**FINISHED.fields, "usage": usage})
        await worker.scripts.finish(attempt.increment(), write)
        stored: Any = await worker.redis.hgetall(worker.keys.metrics(worker.queue, 0))
    counts = {name.partition(":")[2]: number for name, number in sum_partitions([stored]).items()}
    assert {name: counts[name] for name in counts if name.startswith(("computed", "lookups", "cached"))} == counted


async def test_two_jobs_add_up_in_their_buckets(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        for _ in range(2):
            attempt = await start(client, worker, priority="bulk")
            await worker.scripts.finish(attempt.increment(), FINISHED)
        samples = await samples_of(worker)
    ((_, value),) = [item for item in samples.values[f.PROMPT_LENGTH].items() if item[0][1] == "bulk"]
    assert isinstance(value, Histogram)
    assert dict(zip(f.PROMPT_LENGTH.bounds, value.counts, strict=False))[512] == 2
    assert (sum(value.counts), value.total) == (2, 600)
    assert count_of(samples, f.INTER_TOKEN, "bulk") == 8


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_a_job_that_ends_without_a_worker_is_counted(redis_url: str, queue: str, how: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello", queue_timeout_s=0.001 if how == "deadline" else None)
        if how == "cancelled":
            await job.cancel()
            await job.cancel()
        else:
            await asyncio.sleep(0.01)  # until the deadline has passed on the clock of Redis
            assert [await JobScripts(worker.redis, worker.keys).expire(job.id) for _ in range(2)] == ["ended", "none"]
        samples = await samples_of(worker)
    assert count_of(samples, f.JOBS_ENDED, "interactive", "finished", how) == 1
    assert count_of(samples, f.QUEUE_WAIT, "interactive") == 1
    assert count_of(samples, f.OUTPUT_LENGTH, "interactive") == 1
    assert count_of(samples, f.TIME_TO_FIRST_TOKEN, "interactive") == 0
    assert count_of(samples, f.PROMPT_LENGTH, "interactive") == 0


async def test_failed_jobs_are_counted_by_their_error_code(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await (await start(client, worker)).fail(ErrorCode.PROMPT_TOO_LONG, "the prompt is too long")
        attempt = await start(client, worker)
        error = Failed(code=ErrorCode.DAMAGED, message="damaged")
        assert await worker_scripts(worker).bury(attempt.claim, attempt.number, error)
        attempt = await start(client, worker)
        unknown = Failed(code="a_code_of_the_future", message="")
        write = TerminalWrite(unknown, {"error": codec.encode_event(unknown)})
        assert (await worker.scripts.finish(attempt.increment(), write)).code == "ok"
        samples = await samples_of(worker)
    for code in ("prompt_too_long", "damaged", "other"):
        assert count_of(samples, f.JOBS_ENDED, "interactive", "failed", code) == 1
    assert count_of(samples, f.JOB_DURATION, "interactive") == 3


async def test_the_times_of_an_attempt_that_died_are_counted_with_those_of_the_next(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        attempt = await start(client, worker)
        first = replace(attempt.increment([1, 2, 3], "abc"), token_times="40 60 10=2")
        await worker.scripts.flush([first], LEASE_MS, renew=False)
        again = await worker.claim_scripts.claim_job(attempt.claim, "other", LEASE_MS)
        assert not isinstance(again, str)
        assert again.token_times == "40 60 10=2"
        samples = await samples_of(worker)
    assert count_of(samples, f.ATTEMPTS) == 2


async def test_a_job_ends_although_another_client_has_overwritten_the_counters(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        attempt = await start(client, worker)
        await worker.redis.set(worker.keys.metrics(queue, 0), "not a hash")
        assert (await worker.scripts.finish(attempt.increment(), FINISHED)).code == "ok"
        samples = await samples_of(worker)
        assert count_of(samples, f.JOBS_ENDED, "interactive", "finished", "stop") == 1
        await worker.redis.hset(worker.keys.metrics(queue, 0), "interactive:finished:stop", "much")
        attempt = await start(client, worker)
        assert (await worker.scripts.finish(attempt.increment(), FINISHED)).code == "ok"
        samples = await samples_of(worker)
        assert count_of(samples, f.JOBS_ENDED, "interactive", "finished", "stop") == 1


def test_values_of_buckets_that_this_version_does_not_have_are_in_the_next_larger_one() -> None:
    samples = Samples()
    add_job_counters(samples, "q", {"bulk:queue_ms:7": 2, "bulk:queue_ms:99999999": 1, "bulk:queue_ms:inf": 4})
    value = samples.values[f.QUEUE_WAIT]["q", "bulk"]
    assert isinstance(value, Histogram)
    assert dict(zip(f.QUEUE_WAIT.bounds, value.counts, strict=False))[0.01] == 2
    assert value.counts[-1] == 5


def test_partitions_are_added_up_and_other_fields_are_left_out() -> None:
    assert sum_partitions([{b"a": b"1", b"about": b"text"}, {b"a": b"2", b"b": b"-3", b"c": b"1" * 5000}]) == {"a": 3}


@pytest.mark.parametrize("bound", ["²", "1" * 5000])
def test_a_bucket_that_is_no_number_is_left_out(bound: str) -> None:
    samples = Samples()
    add_job_counters(samples, "queue", {f"interactive:queue_ms:{bound}": 1, "interactive:queue_ms:10": 2})
    assert count_of(samples, f.QUEUE_WAIT, "interactive") == 2


async def test_the_time_of_prompts_counts_only_jobs_that_have_a_token(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        for text in ("has a token", "is cancelled while it waits"):
            job = await client.submit(text)
            await asyncio.sleep(0.02)
            if text == "has a token":
                attempt = await worker.start_next()
                times = {**FINISHED.fields, "token_times": "90000 90000"}
                await worker.scripts.finish(attempt.increment(), replace(FINISHED, fields=times))
            else:
                await job.cancel()
        stored: Any = await worker.redis.hgetall(worker.keys.metrics(worker.queue, 0))
        counts = sum_partitions([stored])
    assert 80_000 < counts["interactive:prompt_ms"] < 90_000
    assert counts["interactive:queue_ms:sum"] > 90_000 - counts["interactive:prompt_ms"], "both have waited"
