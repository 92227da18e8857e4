"""What the run of a batch answers to each line, and what it waits for."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.support.batches import answering, begin, end_of, jsonl, line, lines_of
from tests.support.http_server import serving_http

from llamaq.common.errors import NoWorker, ResultTimeout
from llamaq.common.protocol.embedding_task import JobKind, Pooling
from llamaq.common.protocol.queue_and_worker_state import WorkerCard
from llamaq.gateway.batches import request_body
from llamaq.gateway.batches.batch_run import BatchFailed, check_kind
from llamaq.gateway.batches.record import BatchEndpoint
from llamaq.gateway.prepared.completion import PreparedCompletion
from llamaq.producer import AsyncClient
from llamaq.producer.testing import FakeWorker


async def test_a_batch_answers_each_line_and_names_those_that_failed(redis_url: str, queue: str) -> None:
    lines = [line(f"row {number}", f"text {number}") for number in range(20)]
    bad = line("bad", "x", temperature="hot")
    async with (
        answering(redis_url, queue),
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
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
        httpx.AsyncClient(base_url=url, timeout=60) as http,
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


async def test_a_batch_that_its_window_ends_has_an_error_for_each_open_line(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(request_body._UNITS_S, "m", 1)
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
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


async def test_a_line_is_computed_again_if_another_version_of_the_server_has_submitted_it_otherwise(
    redis_url: str, queue: str
) -> None:
    async with (
        serving_http(redis_url, queue, max_batches=0) as old,
        httpx.AsyncClient(base_url=old, timeout=60) as http,
    ):
        batch = await begin(http, jsonl(line("a", "mine")))
        async with AsyncClient(redis_url, queue) as client:
            await client.submit("theirs", idempotency_key=f"{batch['id'].removeprefix('batch_')}:1")
        assert (await http.get(f"/v1/batches/{batch['id']}")).json()["status"] == "validating"
        async with answering(redis_url, queue), serving_http(redis_url, queue):
            done = await end_of(http, batch)
            (answer,) = await lines_of(http, done["output_file_id"])
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "re: mine"


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
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        done = await end_of(http, await begin(http, jsonl(line("a", "x"), line("b", "y"))))
    assert (n_prepared, n_answered) == (3, 3)
    assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


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
