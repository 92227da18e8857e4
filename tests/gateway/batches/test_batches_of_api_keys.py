"""Batches of an API key run within its limits, and no other key sees them."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from tests.support.api_keys import bearer, key_store
from tests.support.batches import CHAT, answering, begin, end_of, jsonl, line, lines_of
from tests.support.http_server import serving_http

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.redis.connect import connect
from llamaq.gateway.batches import runner
from llamaq.gateway.batches.record import BatchRequest, BatchStatus
from llamaq.gateway.batches.store import BatchStore
from llamaq.gateway.http_keys import HttpKeys
from llamaq.producer.testing import FakeWorker


async def test_the_batches_of_a_key_with_limits_run_one_after_the_other_within_them(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.05)
    async with (
        key_store(redis_url, queue) as keys,
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        serving_http(redis_url, queue, key_prefix=queue, require_key=True, batch_lease_s=3) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers=bearer(await keys.add(name="narrow", max_open=2))) as http,
    ):
        first = await begin(http, jsonl(*(line(str(number), "x") for number in range(4))))
        attempt = await worker.start_next()
        second = await begin(http, jsonl(line("a", "x")))
        while (n_jobs := await worker.redis.xlen(worker.keys.jobs(queue, 0, Priority.BULK))) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert n_jobs == 2
        assert (await http.get(f"/v1/batches/{second['id']}")).json()["status"] == "validating"
        await attempt.answer(["ok"])
        for _ in range(4):
            await (await worker.start_next()).answer(["ok"])
        ends = [await end_of(http, batch) for batch in (first, second)]
    assert [each["request_counts"]["completed"] for each in ends] == [4, 1]
    assert ends[0]["completed_at"] <= ends[1]["in_progress_at"]


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_batch_that_is_cancelled_or_expires_while_another_runs_ends_without_its_turn(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.05)
    async with (
        key_store(redis_url, queue) as keys,
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        serving_http(redis_url, queue, key_prefix=queue, require_key=True) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers=bearer(await keys.add(name="narrow", max_open=2))) as http,
    ):
        await worker.announce()
        first = await begin(http, jsonl(line("a", "x")))
        attempt = await worker.start_next()
        waiting = await begin(http, jsonl(line("b", "y")))
        if is_cancelled:
            await http.post(f"/v1/batches/{waiting['id']}/cancel")
        else:
            await expire(worker, waiting["id"])
        ended = await end_of(http, waiting)
        still = (await http.get(f"/v1/batches/{first['id']}")).json()["status"]
        await attempt.answer(["ok"])
        done = await end_of(http, first)
        errors = [] if is_cancelled else await lines_of(http, ended["error_file_id"])
    assert (ended["status"], still) == ("cancelled" if is_cancelled else "expired", "in_progress")
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", 1)
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [("b", "batch_expired")] * len(errors)
    assert len(errors) == (0 if is_cancelled else 1)


@pytest.mark.parametrize("has_damaged", [False, True])
async def test_a_cancelled_batch_ends_although_the_server_runs_as_many_as_it_may(
    redis_url: str, queue: str, has_damaged: bool
) -> None:
    async with (
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        serving_http(redis_url, queue, key_prefix=queue, max_batches=1) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        first = await begin(http, jsonl(line("a", "x")))
        attempt = await worker.start_next()
        if has_damaged:  # it is due before the others
            damaged = await begin(http, jsonl(line("b", "y")))
            await worker.redis.hset(HttpKeys(worker.keys.prefix).http_batch(damaged["id"]), "request", "{")
        waiting = await begin(http, jsonl(line("c", "z")))
        await http.post(f"/v1/batches/{waiting['id']}/cancel")
        ended = await end_of(http, waiting)
        still = (await http.get(f"/v1/batches/{first['id']}")).json()["status"]
        await attempt.answer(["ok"])
        done = await end_of(http, first)
    assert (ended["status"], still, done["status"]) == ("cancelled", "in_progress", "completed")


async def test_a_batch_that_has_waited_beyond_its_window_is_expired_although_its_input_is_gone(
    redis_url: str, queue: str
) -> None:
    async with FakeWorker(redis_url, queue, key_prefix=queue) as worker:
        async with (
            serving_http(redis_url, queue, key_prefix=queue, max_batches=0) as idle,
            httpx.AsyncClient(base_url=idle, timeout=60) as http,
        ):
            batch = await begin(http, jsonl(line("a", "x")))
            assert (await http.delete(f"/v1/files/{batch['input_file_id']}")).json()["deleted"]
            await expire(worker, batch["id"])
        async with (
            serving_http(redis_url, queue, key_prefix=queue) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as http,
        ):
            ended = await end_of(http, batch)
    assert (ended["status"], ended["errors"], ended["error_file_id"]) == ("expired", None, None)


async def expire(worker: FakeWorker, batch_id: str) -> None:
    """Let the completion window of a batch end a second ago."""
    key = HttpKeys(worker.keys.prefix).http_batch(batch_id)
    request = BatchRequest.model_validate_json(await worker.redis.hget(key, "request") or b"")
    late = request.model_copy(update={"expires_s": int(time.time()) - 1})
    await worker.redis.hset(key, "request", late.model_dump_json())


async def test_a_line_may_have_more_jobs_than_its_key_may_have_open(redis_url: str, queue: str) -> None:
    async with (
        key_store(redis_url, queue) as keys,
        answering(redis_url, queue, prefix=queue),
        serving_http(redis_url, queue, key_prefix=queue, require_key=True) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers=bearer(await keys.add(name="narrow", max_open=2))) as http,
    ):
        lines = [line("many", "x", n=9), line("one", "y"), line("too many", "x", n=200)]
        done = await end_of(http, await begin(http, jsonl(*lines)))
        answers = {each["custom_id"]: each["response"]["body"] for each in await lines_of(http, done["output_file_id"])}
        (error,) = await lines_of(http, done["error_file_id"])
    assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert [each["message"]["content"] for each in answers["many"]["choices"]] == ["re: x"] * 9
    assert answers["many"]["usage"]["completion_tokens"] == 18
    assert (error["custom_id"], error["response"]["status_code"]) == ("too many", 400)


async def test_a_key_sees_its_own_files_and_batches_and_its_jobs_keep_its_rules(redis_url: str, queue: str) -> None:
    requests: list[JobRequest] = []

    def answer(request: JobRequest) -> list[str]:
        requests.append(request)
        return ["ok"]

    async with (
        key_store(redis_url, queue) as keys,
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        serving_http(redis_url, queue, key_prefix=queue, require_key=True) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers=bearer(await keys.add(name="alice", max_open=2))) as alice,
        httpx.AsyncClient(
            base_url=url, timeout=60, headers=bearer(await keys.add(name="bob", queues=("other",)))
        ) as bob,
    ):
        serving = asyncio.create_task(worker.serve(answer))
        batch = await begin(alice, jsonl(*(line(str(number), "x", tenant="bob") for number in range(5))))
        done = await end_of(alice, batch)
        foreign = [
            await bob.get(f"/v1/batches/{batch['id']}"),
            await bob.post(f"/v1/batches/{batch['id']}/cancel"),
            *[await bob.get(f"/v1/files/{done[name]}/content") for name in ("input_file_id", "output_file_id")],
            await bob.delete(f"/v1/files/{done['input_file_id']}"),
            await bob.post("/v1/batches", json={"input_file_id": done["input_file_id"], "endpoint": CHAT}),
        ]
        lists = [(await bob.get(f"/v1/{name}")).json()["data"] for name in ("files", "batches")]
        refused = await end_of(bob, await begin(bob, jsonl(line("a", "x"))))
        await cancel_tasks(serving)
        revoked = await begin(alice, jsonl(line("a", "x")))
        await end_of(alice, revoked, "in_progress")
        await keys.revoke("alice")
        redis, names = connect(redis_url, name="test"), Keys(queue)
        store = BatchStore(redis, names)
        while (stored := await store.read(revoked["id"])) and not stored.status.has_ended:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await redis.aclose()
    assert done["status"] == "completed"
    assert {(each.tenant, each.cache_salt, each.priority) for each in requests} == {("alice", "alice", "bulk")}
    assert [each.status_code for each in foreign] == [404, 404, 404, 404, 404, 400]
    assert lists == [[], []]
    assert (refused["status"], refused["errors"]["data"][0]["code"]) == ("failed", "queue_not_allowed")
    assert stored is not None
    assert stored.status is BatchStatus.CANCELLED
