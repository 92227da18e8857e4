"""Batches that are cancelled, lose their input file, or are continued by another server."""

from __future__ import annotations

import asyncio
import logging
import secrets

import httpx
import pytest
from tests.support.api_keys import bearer, key_store
from tests.support.batches import answering, begin, echo, end_of, jsonl, line, lines_of
from tests.support.http_server import serving_http

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.job_request import Priority
from llamaq.common.redis.connect import connect
from llamaq.gateway.files import blocks
from llamaq.gateway.http_keys import HttpKeys
from llamaq.producer.testing import FakeWorker


async def test_a_cancelled_batch_keeps_the_answers_that_it_has(redis_url: str, queue: str) -> None:
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await worker.announce()
        batch = await begin(http, jsonl(line("a", "x"), line("b", "y")))
        await (await worker.start_next()).answer(["done"])
        second = await worker.start_next()
        while (await http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"] == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cancelling = (await http.post(f"/v1/batches/{batch['id']}/cancel")).json()
        cancelled = await end_of(http, batch)
        assert (await second.emit([1], "more")).code == "cancel"
        (answer,) = await lines_of(http, cancelled["output_file_id"])
    assert cancelling["status"] in ("cancelling", "cancelled")
    assert (cancelled["status"], cancelled["error_file_id"]) == ("cancelled", None)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "done"
    assert cancelled["cancelling_at"] <= cancelled["cancelled_at"]


async def test_a_server_that_stops_leaves_its_batch_to_another_with_another_queue(redis_url: str, queue: str) -> None:
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, f"{queue}-other", batch_lease_s=0.3) as second,
        httpx.AsyncClient(base_url=second, timeout=60) as http,
    ):
        await worker.announce()
        async with serving_http(redis_url, queue) as first, httpx.AsyncClient(base_url=first, timeout=60) as other:
            batch = await begin(other, jsonl(line("a", "x"), line("b", "y"), line("c", "z")))
            await (await worker.start_next()).answer(["one"])
            held = await worker.start_next()
            await end_of(http, batch, "in_progress")
        await held.answer(["two"])
        await (await worker.start_next()).answer(["three"])
        done = await end_of(http, batch)
        answers = await lines_of(http, done["output_file_id"])
    assert sorted(each["response"]["body"]["choices"][0]["message"]["content"] for each in answers) == [
        "one",
        "three",
        "two",
    ]


async def test_a_server_that_ends_the_batch_of_another_one_cancels_its_jobs(redis_url: str, queue: str) -> None:
    async with FakeWorker(redis_url, queue) as worker:
        await worker.announce()
        async with serving_http(redis_url, queue) as first, httpx.AsyncClient(base_url=first, timeout=60) as http:
            batch = await begin(http, b"\n\n" + jsonl(line("a", "x", n=3), line("b", "y"), line("c", "z")))
            stream = worker.keys.jobs(queue, 0, Priority.BULK)
            while await worker.redis.xlen(stream) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await worker.redis.xlen(stream) == 5
        async with (
            serving_http(redis_url, queue, max_batches=0) as idle,
            httpx.AsyncClient(base_url=idle, timeout=60) as http,
        ):
            assert (await http.post(f"/v1/batches/{batch['id']}/cancel")).json()["status"] == "cancelling"
        async with serving_http(redis_url, queue) as second, httpx.AsyncClient(base_url=second, timeout=60) as http:
            assert (await end_of(http, batch))["status"] == "cancelled"
        assert await worker.redis.xlen(stream) == 0


async def test_damaged_batches_do_not_stop_the_search_for_others(redis_url: str, queue: str) -> None:
    """Another client of Redis has written entries that are no batch ids, and has overwritten a batch."""
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await worker.announce()
        open_batches, damaged = HttpKeys(worker.keys.prefix).http_open_batches(), f"batch_{secrets.token_hex(16)}"
        await worker.redis.set(HttpKeys(worker.keys.prefix).http_batch(damaged), "not a hash", ex=60)
        await worker.redis.zadd(open_batches, {b"\xff": 1, b"junk": 2, damaged.encode(): 3})
        batch = await begin(http, jsonl(line("a", "x")))
        await (await worker.start_next()).answer(["done"])
        assert (await end_of(http, batch))["status"] == "completed"
        left = await worker.redis.zrange(open_batches, 0, -1)
        assert not {b"\xff", b"junk", damaged.encode()} & set(left)


async def test_a_batch_whose_input_is_deleted_fails_and_leaves_no_job(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCKS_AT_ONCE", 1)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 200)
    async with (
        key_store(redis_url, queue) as keys,
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        serving_http(redis_url, queue, key_prefix=queue, require_key=True) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers=bearer(await keys.add(name="narrow", max_open=2))) as http,
    ):
        await worker.announce()
        batch = await begin(http, jsonl(*(line(str(number), "x") for number in range(40))))
        attempt = await worker.start_next()
        assert (await http.delete(f"/v1/files/{batch['input_file_id']}")).json()["deleted"]
        await attempt.answer(["done"])
        serving = asyncio.create_task(worker.serve(echo))
        now = await end_of(http, batch)
        await cancel_tasks(serving)
        answers = await lines_of(http, now["output_file_id"])
        assert await worker.redis.xlen(worker.keys.jobs(queue, 0, Priority.BULK)) == 0
    assert now["status"] == "failed"
    assert "deleted" in now["errors"]["data"][0]["message"]
    assert now["request_counts"]["completed"] == len(answers) < 40


async def test_an_outage_of_redis_is_one_warning(redis_url: str, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    async def n_refused() -> int:
        return int((await redis.info("errorstats")).get("errorstat_WRONGTYPE", {"count": 0})["count"])

    redis, key = connect(redis_url, name="test"), HttpKeys(queue).http_open_batches()
    await redis.set(key, "not a sorted set")
    n_before = await n_refused()
    with caplog.at_level(logging.INFO, "llamaq.gateway.batches.runner"):
        async with serving_http(redis_url, queue, key_prefix=queue, batch_lease_s=0.1):
            while await n_refused() < n_before + 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await redis.delete(key)
            while "batch.redis_recovered" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await redis.aclose()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "batch.redis_error error=WRONGTYPE Operation against a key holding the wrong kind of value"
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [("request", b"{"), ("request", b"\xff"), ("status", b"x"), ("total", b"many"), ("errors", b"[")],
)
async def test_a_damaged_batch_is_named_and_disturbs_no_other(
    redis_url: str, queue: str, caplog: pytest.LogCaptureFixture, field: str, value: bytes
) -> None:
    keys = HttpKeys(f"damaged-{secrets.token_hex(4)}")
    options = {"key_prefix": keys.prefix}
    async with connect(redis_url, name="test") as redis:
        async with (
            serving_http(redis_url, queue, max_batches=0, **options) as idle,
            httpx.AsyncClient(base_url=idle, timeout=60) as http,
        ):
            damaged, other = [(await begin(http, jsonl(line("a", "x"))))["id"] for _ in range(2)]
            await redis.hset(keys.http_batch(damaged), field, value)
            shown = await http.get(f"/v1/batches/{damaged}")
            listed = (await http.get("/v1/batches")).json()["data"]
        assert (shown.status_code, f"batch '{damaged}' in Redis is damaged" in shown.text) == (500, True)
        assert [batch["id"] for batch in listed] == [other]
        with caplog.at_level(logging.ERROR, "llamaq.gateway.batches.runner"):
            async with (
                answering(redis_url, queue, keys.prefix),
                serving_http(redis_url, queue, **options) as running,
                httpx.AsyncClient(base_url=running, timeout=60) as http,
            ):
                assert (await end_of(http, {"id": other}))["status"] in ("completed", "failed")
                while await redis.zcard(keys.http_open_batches()):  # noqa: ASYNC110 - Redis is asked
                    await asyncio.sleep(0.01)
    assert caplog.text.count(f"batch.damaged id={damaged}") == 1
