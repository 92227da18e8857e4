"""What Redis stores of a batch: once for each idempotency key, and written by its runner alone."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.support.batches import CHAT, answering, end_of, jsonl, line, upload
from tests.support.http_server import serving_http
from tests.support.shifted_clock import with_clock

from llamaq.common.redis.connect import connect
from llamaq.gateway.batches import request_body
from llamaq.gateway.batches.record import BatchStatus
from llamaq.gateway.batches.store import BatchStore, LeaseLost
from llamaq.gateway.files.blocks import compress
from llamaq.gateway.http.errors import RequestRefused
from llamaq.gateway.http.query_parameters import Page
from llamaq.gateway.http_keys import HttpKeys
from llamaq.gateway.settings import serve_settings


async def test_a_repeated_request_with_an_idempotency_key_gets_the_same_batch(redis_url: str, queue: str) -> None:
    async with (
        answering(redis_url, queue),
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        file_id = (await upload(http, jsonl(line("a", "x")))).json()["id"]

        async def create(key: str, **fields: Any) -> httpx.Response:
            body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
            return await http.post("/v1/batches", json=body, headers={"Idempotency-Key": key})

        together = [each.json() for each in await asyncio.gather(*(create(queue) for _ in range(3)))]
        completed = await end_of(http, together[0])
        await http.delete(f"/v1/files/{file_id}")
        later = (await create(queue)).json()
        conflict = await create(queue, metadata={"job": "other"})
        listed = [each["id"] for each in (await http.get("/v1/batches?limit=100")).json()["data"]]
        now = await end_of(http, together[0])
    assert {each["id"] for each in together} == {later["id"]}
    assert later == now == completed
    assert listed.count(later["id"]) == 1
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert conflict.headers["x-should-retry"] == "false"


async def test_a_client_that_polls_a_batch_writes_nothing(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = connect(redis_url, name="test")
    store = BatchStore(redis, HttpKeys(queue))
    body = {"input_file_id": "file-x", "endpoint": CHAT}
    batch = await store.create(request_body.read_batch_request(body, serve_settings(), None, is_revocable=False))
    monkeypatch.setattr(redis, "zadd", None)  # a full Redis would refuse it
    assert not await store.reopen(batch)
    await redis.aclose()


@pytest.mark.parametrize("is_ascending", [False, True])
async def test_batches_that_are_stored_no_longer_leave_no_gaps_in_the_list(
    redis_url: str, queue: str, *, is_ascending: bool
) -> None:
    redis, keys = connect(redis_url, name="test"), HttpKeys(queue)
    store = BatchStore(redis, keys)
    body = {"input_file_id": "file-x", "endpoint": CHAT}
    names = []
    for number in range(12):
        request = request_body.read_batch_request(body, serve_settings(), None, is_revocable=False)
        await store.create(request.model_copy(update={"created_ms": number}))
        names.append(request.id)
    for number in (0, 1, 4, 5, 6, 7, 8, 11):
        await redis.delete(keys.http_batch(names[number]))
    await redis.hset(keys.http_batch(names[9]), "status", "damaged")

    async def pages(limit: int, after: str | None) -> list[list[int]]:
        """Return the numbers of the batches on each page."""
        found, has_more = [], True
        while has_more:
            batches, has_more = await store.listed(None, Page(limit, after, is_ascending))
            assert batches or not has_more
            found.append([names.index(each.request.id) for each in batches])
            after = batches[-1].request.id if batches else None
        return found

    first, last = (4, [10]) if is_ascending else (8, [3, 2])
    assert await pages(2, names[first]) == [last], "the place of a batch that is stored no longer"
    everything = [2, 3, 10] if is_ascending else [10, 3, 2]
    assert await pages(2, None) == [everything[:2], everything[2:]]
    assert await pages(1, None) == [[each] for each in everything]
    assert await redis.zcard(keys.http_batches("")) == 4
    await redis.aclose()


@pytest.mark.parametrize("how", ["repeated", "retrieved", "cancelled"])
async def test_a_batch_whose_server_was_killed_while_it_stored_the_batch_is_run(
    redis_url: str, queue: str, how: str
) -> None:
    redis, keys = connect(redis_url, name="test"), HttpKeys(queue)
    headers = {"Idempotency-Key": queue}
    async with (
        answering(redis_url, queue, queue),
        serving_http(redis_url, queue, key_prefix=queue, max_batches=0) as idle,
        httpx.AsyncClient(base_url=idle, timeout=60) as http,
    ):
        file_id = (await upload(http, jsonl(line("a", "x")))).json()["id"]
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        begun = (await http.post("/v1/batches", json=body, headers=headers)).json()
        assert await redis.zrem(keys.http_open_batches(), begun["id"]) == 1
        place = f"/v1/batches/{begun['id']}"
        if how == "retrieved":
            await http.get(place)
        else:
            path = "/v1/batches" if how == "repeated" else f"{place}/cancel"
            await http.post(path, json=body, headers=headers)
        assert await BatchStore(redis, keys).due(1, 15) == [begun["id"]]
        async with serving_http(redis_url, queue, key_prefix=queue):
            ended = await end_of(http, begun)
    assert ended["status"] == ("cancelled" if how == "cancelled" else "completed")
    await redis.aclose()


async def test_a_batch_is_due_at_once_if_the_clock_of_its_server_is_ahead_of_redis(redis_url: str, queue: str) -> None:
    redis = connect(redis_url, name="test")
    store = BatchStore(redis, HttpKeys(queue))
    body = {"input_file_id": "file-x", "endpoint": CHAT}
    request = request_body.read_batch_request(body, serve_settings(), None, is_revocable=False)
    ahead = request.model_copy(update={"created_ms": request.created_ms + 3_600_000})
    batch = await store.create(ahead)
    assert await store.due(1, 15) == [ahead.id]
    await store.close(ahead.id)
    assert await store.reopen(batch) is True
    assert await store.due(1, 15) == [ahead.id]
    await redis.aclose()


async def test_a_batch_that_has_ended_is_forgotten_if_it_is_cancelled_at_this_moment(
    redis_url: str, queue: str
) -> None:
    redis = connect(redis_url, name="test")
    store = BatchStore(redis, HttpKeys(queue))
    body = {"input_file_id": "file-x", "endpoint": CHAT}
    request = request_body.read_batch_request(body, serve_settings(), None, is_revocable=False)
    running = await store.create(request)
    await store.claim(request.id, "one", 30)
    await store.advance(request, "one", BatchStatus.COMPLETED)
    await store.close(request.id)
    await store.cancel(request.id)
    assert await store.reopen(running) is False
    assert await store.due(1, 15) == [request.id]
    assert (await store.claim(request.id, "two", 30)).code == "ended"
    assert await store.due(1, 15) == []
    ended = await store.read(request.id)
    assert ended is not None
    assert ended.status is BatchStatus.COMPLETED
    assert await store.reopen(ended) is False
    assert await store.due(1, 15) == []
    await redis.aclose()


@pytest.mark.parametrize(
    ("metadata", "is_valid"),
    [
        ({"n" * 64: "v" * 512, **{str(number): "" for number in range(15)}}, True),
        ({"n" * 65: "v"}, False),
        ({"n": "v" * 513}, False),
        ({"n": 1}, False),
        ({str(number): "" for number in range(17)}, False),
        ([], False),
    ],
)
def test_the_metadata_of_a_batch_are_up_to_16_texts(metadata: Any, is_valid: bool) -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "metadata": metadata}
    if is_valid:
        request = request_body.read_batch_request(body, serve_settings(), None, is_revocable=False)
        assert request.metadata == metadata
    else:
        with pytest.raises(RequestRefused, match="metadata: an object with at most 16 texts of 512 characters"):
            request_body.read_batch_request(body, serve_settings(), None, is_revocable=False)


async def test_only_the_runner_of_a_batch_writes_and_a_repeated_write_changes_nothing(
    redis_url: str, queue: str
) -> None:
    redis, keys = connect(redis_url, name="test"), HttpKeys(queue)
    store = BatchStore(redis, keys)
    body = {"input_file_id": "file-x", "endpoint": CHAT}
    request = request_body.read_batch_request(body, serve_settings(), None, is_revocable=False)
    await store.create(request)
    assert (await store.claim(request.id, "one", 30)).code == "mine"
    assert (await store.claim(request.id, "two", 30)).code == "held"
    assert await store.due(1, 30) == []

    async def write(runner: str) -> None:
        blocks = await compress(b"x\n")
        await store.write(request, runner, n_before=0, output=blocks, errors=[], counters={"completed": 1})

    await write("one")
    await write("one")
    assert await redis.llen(keys.http_file(request.output_file_id)) == 1
    await store.claim(request.id, "one", 0)
    assert (await store.claim(request.id, "two", 30)).code == "mine"
    with pytest.raises(LeaseLost):
        await write("one")
    with pytest.raises(LeaseLost):
        await store.advance(request, "one", BatchStatus.COMPLETED)
    batch = await store.read(request.id)
    assert batch is not None
    assert (batch.number("completed"), batch.status) == (1, "validating")
    await redis.aclose()


@pytest.mark.parametrize("is_alive", [False, True])
async def test_a_lease_ends_in_time_although_the_clock_of_redis_was_set_back(
    redis_url: str, queue: str, *, is_alive: bool
) -> None:
    redis, keys = connect(redis_url, name="test"), HttpKeys(queue)
    store = BatchStore(redis, keys)

    def at(ahead_s: int) -> BatchStore:
        """Return the store as it was when the clock was ahead."""
        shifted = copy.copy(store)
        shifted._scripts = {**store._scripts, "claim": with_clock(store._scripts["claim"], ahead_s)}
        return shifted

    request = request_body.read_batch_request(
        {"input_file_id": "file-x", "endpoint": CHAT}, serve_settings(), None, is_revocable=False
    )
    await store.create(request)
    assert (await at(600).claim(request.id, "one", 60)).code == "mine"
    assert await store.due(1, 15) == [request.id], "due only in ten minutes, by a clock that was set back"
    held = await store.claim(request.id, "two", 15)
    assert held.code == "held", "its runner has the length of a lease to renew it"
    seconds, _ = await redis.time()
    assert held.until_ms <= (seconds + 61) * 1000
    if is_alive:
        assert (await store.claim(request.id, "one", 60)).code == "mine"
        assert (await at(59).claim(request.id, "two", 15)).code == "held"
    else:
        assert (await at(61).claim(request.id, "two", 15)).code == "mine"
    await redis.aclose()


async def test_a_server_leaves_a_lease_that_is_longer_than_its_own(redis_url: str, queue: str) -> None:
    redis, keys = connect(redis_url, name="test"), HttpKeys(queue)
    store = BatchStore(redis, keys)
    request = request_body.read_batch_request(
        {"input_file_id": "file-x", "endpoint": CHAT}, serve_settings(), None, is_revocable=False
    )
    await store.create(request)
    first = await store.claim(request.id, "one", 3600)
    assert await store.due(1, 15) == [request.id]
    assert await store.claim(request.id, "two", 15) == replace(first, code="held")
    await redis.aclose()
