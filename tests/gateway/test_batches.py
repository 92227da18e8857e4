"""Files and batches: what the server stores, computes, refuses, and continues when another server has died."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.support.http_server import serving_http

from llamaq.common.cancel_tasks import cancel_tasks
from llamaq.common.errors import NoWorker, ResultTimeout
from llamaq.common.protocol.embedding_task import JobKind, Pooling
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_and_worker_state import WorkerCard
from llamaq.common.redis.connect import connect
from llamaq.gateway.batches import request_body, runner
from llamaq.gateway.batches.batch_run import BatchFailed, check_kind
from llamaq.gateway.batches.record import BatchEndpoint, BatchStatus
from llamaq.gateway.batches.store import BatchStore, LeaseLost
from llamaq.gateway.files import blocks
from llamaq.gateway.files.blocks import compress
from llamaq.gateway.keys.key_store import KeyStore
from llamaq.gateway.prepared.completion import PreparedCompletion
from llamaq.gateway.settings import serve_settings
from llamaq.producer import AsyncClient
from llamaq.producer.testing import FakeWorker

CHAT = "/v1/chat/completions"


def line(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    """Return a line of an input file."""
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked}


def jsonl(*lines: object) -> bytes:
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines).encode()


def echo(request: JobRequest) -> list[str]:
    return ["re: ", str(request.messages[-1].content if request.messages else request.prompt)]


@asynccontextmanager
async def key_store(redis_url: str, prefix: str) -> AsyncIterator[KeyStore]:
    redis = connect(redis_url, name="test")
    try:
        yield KeyStore(redis, Keys(prefix))
    finally:
        await redis.aclose()


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@asynccontextmanager
async def answering(redis_url: str, queue: str, prefix: str = "llamaq") -> AsyncIterator[None]:
    """Answer the jobs of a queue within this context."""
    async with FakeWorker(redis_url, queue, key_prefix=prefix) as worker:
        task = asyncio.create_task(worker.serve(echo))
        try:
            yield
        finally:
            await cancel_tasks(task)


async def upload(http: httpx.AsyncClient, content: bytes, **fields: str) -> httpx.Response:
    return await http.post(
        "/v1/files", files={"file": ("../../etc/in.jsonl", content)}, data={"purpose": "batch", **fields}
    )


async def begin(http: httpx.AsyncClient, content: bytes, **fields: Any) -> dict[str, Any]:
    """Upload a file and begin its batch."""
    file_id = (await upload(http, content)).json()["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
    begun = await http.post("/v1/batches", json=body)
    assert begun.status_code == 200, begun.text
    batch: dict[str, Any] = begun.json()
    return batch


async def end_of(http: httpx.AsyncClient, batch: dict[str, Any], *statuses: str) -> dict[str, Any]:
    """Wait until a batch has one of the statuses, and return it."""
    awaited = statuses or ("completed", "failed", "expired", "cancelled")
    while True:
        now: dict[str, Any] = (await http.get(f"/v1/batches/{batch['id']}")).json()
        if now["status"] in awaited:
            return now
        await asyncio.sleep(0.02)


async def lines_of(http: httpx.AsyncClient, file_id: str) -> list[Any]:
    answer = await http.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200
    return [json.loads(each) for each in answer.text.splitlines()]


async def test_a_batch_answers_each_line_and_names_those_that_failed(redis_url: str, queue: str) -> None:
    lines = [line(f"row {number}", f"text {number}") for number in range(20)]
    bad = line("bad", "x", temperature="hot")
    async with (
        answering(redis_url, queue),
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        begun = await begin(http, jsonl(*lines[:10], "", bad, *lines[10:]), metadata={"job": "nightly"})
        done = await end_of(http, begun)
        answers = await lines_of(http, done["output_file_id"])
        (error,) = await lines_of(http, done["error_file_id"])
        listed = (await http.get("/v1/batches")).json()["data"]
        files = {each["id"]: each for each in (await http.get("/v1/files")).json()["data"]}
    assert begun["status"] == "validating"
    assert (done["status"], done["metadata"]) == ("completed", {"job": "nightly"})
    assert done["request_counts"] == {"total": 21, "completed": 20, "failed": 1}
    assert done["usage"]["output_tokens"] == 40
    assert done["in_progress_at"] <= done["finalizing_at"] <= done["completed_at"]
    assert {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in answers} == {
        f"row {number}": f"re: text {number}" for number in range(20)
    }
    assert len(answers) == 20
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert "temperature" in error["error"]["message"]
    assert begun["id"] in [each["id"] for each in listed]
    assert files[done["output_file_id"]]["purpose"] == "batch_output"


async def test_a_defect_of_the_server_at_one_line_is_the_error_of_this_line(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = PreparedCompletion.read

    async def broken(*args: Any) -> PreparedCompletion:
        if args[-1]["messages"][0]["content"] == "secret":
            raise KeyError("secret")
        return await read(*args)

    monkeypatch.setattr(PreparedCompletion, "read", broken)
    async with (
        answering(redis_url, queue),
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        done = await end_of(http, await begin(http, jsonl(line("a", "x"), line("b", "secret"), line("c", "y"))))
        (error,) = await lines_of(http, done["error_file_id"])
    assert (done["status"], done["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})
    assert (error["custom_id"], error["error"]["line"]) == ("b", 2)
    assert error["response"]["status_code"] == 502
    assert "a defect of llamaq (KeyError)" in error["error"]["message"]
    (logged,) = [each.getMessage() for each in caplog.records if "row_failed" in each.getMessage()]
    assert "row=2 error=KeyError" in logged
    assert "secret" not in logged + error["error"]["message"]


async def test_a_batch_with_wrong_lines_fails_and_names_them(redis_url: str, queue: str) -> None:
    lines: list[object] = [
        line("a", "x"),
        "{",
        line("a", "x"),
        line("b", "x", model="other"),
        {**line("c", "x"), "url": "/v1/completions"},
        {"custom_id": "d"},
        '{"custom_id": "e", "body": {"temperature": NaN}}',
        '{"a":' * 100 + "1" + "}" * 100,
    ]
    async with serving_http(redis_url, queue) as url, httpx.AsyncClient(base_url=url) as http:
        failed = await end_of(http, await begin(http, jsonl(*lines)))
        empty = await end_of(http, await begin(http, b"\n"))
        unknown = await end_of(http, await begin(http, jsonl(line("a", "x", model="no-such"))))
        late = await http.post(f"/v1/batches/{failed['id']}/cancel")
    assert [(each["line"], each["code"]) for each in failed["errors"]["data"]] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_model"),
        (5, "mismatched_url"),
        (6, "missing_required_parameter"),
        (7, "invalid_json_line"),
        (8, "invalid_json_line"),
    ]
    assert failed["output_file_id"] is None
    assert [each["errors"]["data"][0]["code"] for each in (empty, unknown)] == ["empty_file", "model_not_found"]
    assert late.status_code == 400


async def test_a_repeated_request_with_an_idempotency_key_gets_the_same_batch(redis_url: str, queue: str) -> None:
    async with (
        answering(redis_url, queue),
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url) as http,
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


async def test_a_cancelled_batch_keeps_the_answers_that_it_has(redis_url: str, queue: str) -> None:
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url) as http,
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


async def test_a_batch_that_its_window_ends_has_an_error_for_each_open_line(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(request_body._UNITS_S, "m", 1)
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        await worker.announce()
        batch = await begin(http, jsonl(line("a", "x"), line("b", "y")), completion_window="1m")
        expired = await end_of(http, batch)
        errors = await lines_of(http, expired["error_file_id"])
    assert (expired["status"], expired["request_counts"]["failed"]) == ("expired", 2)
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        ("a", "batch_expired"),
        ("b", "batch_expired"),
    ]


async def test_a_server_that_stops_leaves_its_batch_to_another_with_another_queue(redis_url: str, queue: str) -> None:
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, f"{queue}-other", batch_lease_s=0.3) as second,
        httpx.AsyncClient(base_url=second) as http,
    ):
        await worker.announce()
        async with serving_http(redis_url, queue) as first, httpx.AsyncClient(base_url=first) as other:
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
        async with serving_http(redis_url, queue) as first, httpx.AsyncClient(base_url=first) as http:
            batch = await begin(http, b"\n\n" + jsonl(line("a", "x", n=3), line("b", "y"), line("c", "z")))
            stream = worker.keys.jobs(queue, 0, Priority.BULK)
            while await worker.redis.xlen(stream) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await worker.redis.xlen(stream) == 5
        async with serving_http(redis_url, queue, max_batches=0) as idle, httpx.AsyncClient(base_url=idle) as http:
            assert (await http.post(f"/v1/batches/{batch['id']}/cancel")).json()["status"] == "cancelling"
        async with serving_http(redis_url, queue) as second, httpx.AsyncClient(base_url=second) as http:
            assert (await end_of(http, batch))["status"] == "cancelled"
        assert await worker.redis.xlen(stream) == 0


async def test_a_batch_whose_input_is_deleted_fails_and_leaves_no_job(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCKS_AT_ONCE", 1)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 200)
    async with (
        key_store(redis_url, queue) as keys,
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        serving_http(redis_url, queue, key_prefix=queue, require_key=True) as url,
        httpx.AsyncClient(base_url=url, headers=bearer(await keys.add(name="narrow", max_open=2))) as http,
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


async def test_a_line_is_computed_again_if_another_version_of_the_server_has_submitted_it_otherwise(
    redis_url: str, queue: str
) -> None:
    async with serving_http(redis_url, queue, max_batches=0) as old, httpx.AsyncClient(base_url=old) as http:
        batch = await begin(http, jsonl(line("a", "mine")))
        async with AsyncClient(redis_url, queue) as client:
            await client.submit("theirs", idempotency_key=f"{batch['id'].removeprefix('batch_')}:1")
        assert (await http.get(f"/v1/batches/{batch['id']}")).json()["status"] == "validating"
        async with answering(redis_url, queue), serving_http(redis_url, queue):
            done = await end_of(http, batch)
            (answer,) = await lines_of(http, done["output_file_id"])
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "re: mine"


async def test_only_the_runner_of_a_batch_writes_and_a_repeated_write_changes_nothing(
    redis_url: str, queue: str
) -> None:
    redis, keys = connect(redis_url, name="test"), Keys(queue)
    store = BatchStore(redis, keys)
    body = {"input_file_id": "file-x", "endpoint": CHAT}
    request = request_body.read_batch_request(body, serve_settings(), None, is_revocable=False)
    await store.create(request)
    assert (await store.claim(request.id, "one", 30)).code == "mine"
    assert (await store.claim(request.id, "two", 30)).code == "held"
    assert await store.due(1) == []

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


async def test_the_batches_of_a_key_with_limits_run_one_after_the_other_within_them(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.05)
    async with (
        key_store(redis_url, queue) as keys,
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        serving_http(redis_url, queue, key_prefix=queue, require_key=True, batch_lease_s=0.3) as url,
        httpx.AsyncClient(base_url=url, headers=bearer(await keys.add(name="narrow", max_open=2))) as http,
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


async def test_a_line_may_have_more_jobs_than_its_key_may_have_open(redis_url: str, queue: str) -> None:
    async with (
        key_store(redis_url, queue) as keys,
        answering(redis_url, queue, prefix=queue),
        serving_http(redis_url, queue, key_prefix=queue, require_key=True) as url,
        httpx.AsyncClient(base_url=url, headers=bearer(await keys.add(name="narrow", max_open=2))) as http,
    ):
        lines = [line("many", "x", n=9), line("one", "y"), line("too many", "x", n=200)]
        done = await end_of(http, await begin(http, jsonl(*lines)))
        answers = {each["custom_id"]: each["response"]["body"] for each in await lines_of(http, done["output_file_id"])}
        (error,) = await lines_of(http, done["error_file_id"])
    assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert [each["message"]["content"] for each in answers["many"]["choices"]] == ["re: x"] * 9
    assert answers["many"]["usage"]["completion_tokens"] == 18
    assert (error["custom_id"], error["response"]["status_code"]) == ("too many", 400)


async def test_a_line_that_needs_a_worker_waits_for_one(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_prepared = n_answered = 0
    read, answer = PreparedCompletion.read, PreparedCompletion.answer

    async def read_later(*args: Any) -> PreparedCompletion:
        nonlocal n_prepared
        n_prepared += 1
        if n_prepared == 1:
            raise NoWorker(queue)
        return await read(*args)

    async def answer_later(*args: Any) -> dict[str, Any]:
        nonlocal n_answered
        n_answered += 1
        if n_answered == 1:
            raise ResultTimeout("no reply")
        return await answer(*args)

    monkeypatch.setattr(PreparedCompletion, "read", read_later)
    monkeypatch.setattr(PreparedCompletion, "answer", answer_later)
    async with (
        answering(redis_url, queue),
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        done = await end_of(http, await begin(http, jsonl(line("a", "x"), line("b", "y"))))
    assert (n_prepared, n_answered) == (3, 3)
    assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


async def test_a_key_sees_its_own_files_and_batches_and_its_jobs_keep_its_rules(redis_url: str, queue: str) -> None:
    requests: list[JobRequest] = []

    def answer(request: JobRequest) -> list[str]:
        requests.append(request)
        return ["ok"]

    async with (
        key_store(redis_url, queue) as keys,
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        serving_http(redis_url, queue, key_prefix=queue, require_key=True) as url,
        httpx.AsyncClient(base_url=url, headers=bearer(await keys.add(name="alice", max_open=2))) as alice,
        httpx.AsyncClient(base_url=url, headers=bearer(await keys.add(name="bob", queues=("other",)))) as bob,
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


@pytest.mark.parametrize(
    ("kind", "pooling", "endpoint", "error"),
    [
        (JobKind.GENERATION, None, BatchEndpoint.CHAT, None),
        (JobKind.EMBEDDING, Pooling.MEAN, BatchEndpoint.EMBEDDINGS, None),
        (JobKind.EMBEDDING, Pooling.NONE, BatchEndpoint.EMBEDDINGS, "do not pool"),
        (JobKind.EMBEDDING, Pooling.MEAN, BatchEndpoint.CHAT, "run embedding jobs, not generation jobs"),
        (JobKind.GENERATION, None, BatchEndpoint.EMBEDDINGS, "run generation jobs, not embedding jobs"),
    ],
)
def test_a_batch_needs_workers_that_compute_what_it_asks_for(
    kind: JobKind, pooling: Pooling | None, endpoint: BatchEndpoint, error: str | None
) -> None:
    fields: dict[str, Any] = {"queue": "q", "kind": kind, "pooling": pooling}  # the others do not matter
    card = WorkerCard.model_construct(**fields)
    if error is None:
        check_kind(card, endpoint)
        return
    with pytest.raises(BatchFailed, match=error):
        check_kind(card, endpoint)
