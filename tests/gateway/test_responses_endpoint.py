"""`/v1/responses` with a fake worker: errors of jobs, pages of items, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import AsyncExitStack

import httpx
import pytest
from tests.gateway.test_disconnects import gateway, until
from tests.support.http_server import post_of, sending, serving_http

from llamaq.common.errors import ErrorCode
from llamaq.common.protocol.job_request import MAX_MESSAGES
from llamaq.gateway import prompt_too_long_error
from llamaq.gateway.http import event_stream
from llamaq.gateway.http.errors import RequestRefused
from llamaq.gateway.http_keys import HttpKeys
from llamaq.gateway.responses.item_references import with_referenced_items
from llamaq.gateway.responses.record import ID_PREFIX, ResponseStore
from llamaq.gateway.routes import responses
from llamaq.gateway.settings import serve_settings
from llamaq.producer import FinishReason
from llamaq.producer.testing import FakeAttempt

RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    ("code", "answered"),
    [
        (ErrorCode.PROMPT_TOO_LONG, "context_length_exceeded"),
        (ErrorCode.INVALID_GRAMMAR, "invalid_grammar"),
    ],
)
async def test_an_error_before_the_first_text_of_a_stream_sets_the_status(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, code: ErrorCode, answered: str
) -> None:
    monkeypatch.setattr(prompt_too_long_error, "ASK_TIMEOUT_S", 0.1)  # the worker does not count the prompt
    monkeypatch.setattr(event_stream, "FIRST_PING_S", 30.0)  # the failure is not late on a busy machine either
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post(RESPONSES, json={"input": "hi", "stream": True}))
        attempt = await worker.start_next()
        await attempt.fail(code)
        answer = await asking
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == answered


@pytest.mark.parametrize("is_background", [False, True])
async def test_the_first_events_of_a_stream_do_not_wait_for_the_job(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, is_background: bool
) -> None:
    first_ping_s = 30.0 if is_background else 0.5
    monkeypatch.setattr(event_stream, "FIRST_PING_S", first_ping_s)
    body = {"input": "hi", "stream": True, "background": is_background}
    loop = asyncio.get_running_loop()
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        start_s = loop.time()
        async with http.stream("POST", RESPONSES, json=body) as answer:
            lines = answer.aiter_lines()
            while "response.created" not in await anext(lines):  # the job waits: a client has the id nevertheless
                pass
            waited_s = loop.time() - start_s
            attempt = await worker.start_next()
            await attempt.fail(ErrorCode.PROMPT_TOO_LONG)
            rest = [line async for line in lines]
    assert (waited_s < first_ping_s) == is_background
    (failed,) = [json.loads(line.removeprefix("data: ")) for line in rest if '"response.failed"' in line]
    assert failed["response"]["error"]["code"] == "context_length_exceeded"


async def test_a_stream_resumed_after_an_error_has_exactly_the_rest(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "FIRST_PING_S", 0.1)
    posted = post_of(RESPONSES, {"input": "hi", "stream": True, "background": True})
    async with gateway(redis_url, queue) as (other_url, worker, _), AsyncExitStack() as open_:
        async with serving_http(redis_url, queue, shutdown_s=0.0) as url:
            first, _ = await open_.enter_async_context(sending(url, posted))
            attempt = await worker.start_next()
            await attempt.emit([1], "one ")
            await first.readuntil(b'"delta":"one "')
            path = f"{RESPONSES}/{ID_PREFIX}{attempt.claim.job_id}?stream=true&starting_after="
            ahead = f"GET {path}1000 HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            second, _ = await open_.enter_async_context(sending(url, ahead))
            await second.readuntil(b"200 OK")
        ended, not_begun = [(await reader.read()).decode() for reader in (first, second)]
        await attempt.finish(text="two", tokens=[2])
        last, last_ahead = [int(re.findall(r'"sequence_number":(-?\d+)', text)[-1]) for text in (ended, not_begun)]
        async with httpx.AsyncClient(base_url=other_url, timeout=60) as http:
            lines = (await http.get(f"{path}{last}")).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "server_stopping" in ended
    assert "server_stopping" in not_begun
    assert "".join(event["delta"] for event in events if "delta" in event) == "two"
    assert last_ahead == 1000


async def test_the_items_of_the_input_are_read_page_by_page(redis_url: str, queue: str) -> None:
    turns = [{"role": "user", "content": str(number)} for number in range(25)]
    async with gateway(redis_url, queue) as (url, _, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        created = (await http.post(RESPONSES, json={"input": turns, "background": True})).json()
        path = f"{RESPONSES}/{created['id']}/input_items"
        whole = (await http.get(path)).json()
        pages = [(await http.get(path, params={"limit": 10, "order": "asc"})).json()]
        for _ in range(3):
            after = {"limit": 10, "order": "asc", "after": pages[-1]["last_id"]}
            pages.append((await http.get(path, params=after)).json())
        refused = [await http.get(path, params=each) for each in ({"limit": 0}, {"after": "x"}, {"order": "up"})]
    assert [len(page["data"]) for page in pages] == [10, 10, 5, 0]
    assert [page["has_more"] for page in pages] == [True, True, False, False]
    texts = [item["content"][0]["text"] for page in pages for item in page["data"]]
    assert texts == [turn["content"] for turn in turns]
    assert [item["content"][0]["text"] for item in whole["data"]] == texts[:-21:-1], "the newest 20 first"
    assert [answer.status_code for answer in refused] == [400, 400, 400]


async def test_a_cancel_returns_when_the_job_has_ended_or_after_a_second(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "CANCEL_WAIT_S", 30.0)
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def begin() -> tuple[str, FakeAttempt]:
            created = (await http.post(RESPONSES, json={"input": "hi", "background": True})).json()
            attempt = await worker.start_next()
            await attempt.emit([1], "a")
            return f"{RESPONSES}/{created['id']}", attempt

        path, attempt = await begin()
        cancelling = asyncio.create_task(http.post(f"{path}/cancel"))

        async def is_told() -> bool:
            return (await attempt.emit([], "")).code == "cancel"

        await until(is_told)
        assert not cancelling.done(), "the worker has not ended the job"
        await attempt.finish(FinishReason.CANCELLED)
        answers = [(await cancelling).json(), (await http.get(path)).json()]
        assert [answer["status"] for answer in answers] == ["cancelled", "cancelled"]

        monkeypatch.setattr(responses, "CANCEL_WAIT_S", 0.1)
        path, attempt = await begin()
        answer = (await http.post(f"{path}/cancel")).json()
        assert answer["status"] == "cancelled", "the worker will end the job"
        await attempt.finish(FinishReason.CANCELLED)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_response_whose_id_no_client_knows_is_cancelled_when_its_client_disconnects(
    redis_url: str, queue: str, is_streamed: bool
) -> None:
    async with (
        gateway(redis_url, queue) as (url, worker, client),
        sending(url, post_of(RESPONSES, {"input": "hi", "stream": is_streamed})) as (_, writer),
    ):
        attempt = await worker.start_next()
        writer.transport.abort()

        async def is_cancelled() -> bool:
            return (await client.job(attempt.claim.job_id).status()).cancel_requested

        await until(is_cancelled)
        await attempt.finish(FinishReason.CANCELLED)


@pytest.mark.parametrize("kept", [{"stream": True}, {"Idempotency_Key": "k"}])
async def test_a_response_that_a_client_can_find_again_outlives_its_client(
    redis_url: str, queue: str, kept: dict[str, str]
) -> None:
    headers = kept if "Idempotency_Key" in kept else {}
    async with gateway(redis_url, queue) as (url, worker, client), httpx.AsyncClient(base_url=url, timeout=60) as http:
        async with sending(url, post_of(RESPONSES, {"input": "hi", **kept}, **headers)) as (reader, writer):
            attempt = await worker.start_next()
            if "stream" in kept:
                await reader.readuntil(b"response.created")  # the event with the id
            writer.transport.abort()
        assert (await http.get("/health")).status_code == 200  # the server handles the disconnect before
        assert not (await client.job(attempt.claim.job_id).status()).cancel_requested
        await attempt.finish(text="end", tokens=[2])
        stored = await http.get(f"{RESPONSES}/{ID_PREFIX}{attempt.claim.job_id}")
    assert stored.json()["output"][0]["content"][0]["text"] == "end"


async def test_the_answer_of_a_request_that_was_not_left_is_stored(redis_url: str, queue: str) -> None:
    async with gateway(redis_url, queue) as (url, worker, client), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post(RESPONSES, json={"input": "hi"}))
        attempt = await worker.start_next()
        await attempt.finish(text="end", tokens=[2])
        answer = (await asking).json()
        stored = await http.get(f"{RESPONSES}/{answer['id']}")
        ttl_s = await client.redis.ttl(client.keys.of_job(attempt.claim.job_id).job)
    assert stored.json() == answer
    assert ttl_s > client.connection.settings.result_ttl_s


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_no_conversation_is_left_of_a_response_whose_id_no_client_has(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, is_streamed: bool, leaves: bool
) -> None:
    monkeypatch.setattr(responses, "FIRST_PING_S", 30.0)
    monkeypatch.setattr(event_stream, "FIRST_PING_S", 30.0)  # the first event is not sent before the failure
    async with (
        gateway(redis_url, queue) as (url, worker, client),
        sending(url, post_of(RESPONSES, {"input": "hi", "stream": is_streamed})) as (reader, writer),
    ):
        attempt = await worker.start_next()
        record = HttpKeys(client.keys.prefix).http_response(attempt.claim.job_id)

        async def is_stored() -> bool:
            return bool(await client.redis.exists(record))

        async def is_gone() -> bool:
            return not await is_stored()

        await until(is_stored)
        if leaves:
            writer.transport.abort()
        else:
            await attempt.fail(ErrorCode.DECODE_FAILED)
            assert b" 502 " in await reader.readuntil(b"\r\n")
        await until(is_gone)


@pytest.mark.parametrize("kept", [{}, {"stream": True}, {"background": True}, {"stream": True, "background": True}])
@pytest.mark.parametrize("fails", [False, True])
async def test_the_conversation_of_a_response_expires_soon_after_its_answer(
    redis_url: str, queue: str, kept: dict[str, bool], fails: bool
) -> None:
    headers = {"Idempotency-Key": queue}
    async with gateway(redis_url, queue) as (url, worker, client), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post(RESPONSES, json={"input": "hi", **kept}, headers=headers))
        attempt = await worker.start_next()
        await attempt.emit([1], "a")
        job_id = attempt.claim.job_id
        record = HttpKeys(client.keys.prefix).http_response(job_id)

        async def is_stored() -> bool:
            return bool(await client.redis.exists(record))

        await until(is_stored)
        early_s = await client.redis.ttl(record)
        await (attempt.fail() if fails else attempt.finish())
        await asking
        if "stream" not in kept and (fails or "background" in kept):
            assert (await http.get(f"{RESPONSES}/{ID_PREFIX}{job_id}")).status_code == 200
        result_s, record_s = [await client.redis.ttl(key) for key in (client.keys.of_job(job_id).job, record)]
    assert early_s > result_s + 24 * 3600
    assert result_s < record_s < result_s + 120


@pytest.mark.parametrize("delay", [{"delay_s": 1e7}, {"run_at": 1e11}, {"run_at": 5}])
async def test_the_conversation_of_a_delayed_response_expires_a_week_after_the_job_is_due(
    redis_url: str, queue: str, delay: dict[str, float]
) -> None:
    due_s = delay.get("delay_s", 0.0) or max(0.0, delay["run_at"] - time.time())
    body = {"input": "hi", "background": True, **delay}
    async with gateway(redis_url, queue) as (url, _, client), httpx.AsyncClient(base_url=url, timeout=60) as http:
        job_id = (await http.post(RESPONSES, json=body)).json()["id"].removeprefix(ID_PREFIX)
        record_s = await client.redis.ttl(HttpKeys(client.keys.prefix).http_response(job_id))
        await client.job(job_id).cancel()
    stored_s = serve_settings().response_ttl_s + 7 * 24 * 3600
    assert due_s + stored_s - 120 < record_s < due_s + stored_s + 120


async def test_a_deleted_response_is_not_in_redis_and_a_repeated_request_gets_a_new_one(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"Idempotency-Key": queue}
    async with gateway(redis_url, queue) as (url, worker, client), httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def begin(**more: bool) -> tuple[asyncio.Task[httpx.Response], FakeAttempt, str]:
            asking = asyncio.create_task(http.post(RESPONSES, json={"input": "hi", **more}, headers=headers))
            attempt = await worker.start_next()
            return asking, attempt, f"{RESPONSES}/{ID_PREFIX}{attempt.claim.job_id}"

        asking, attempt, path = await begin()
        await attempt.finish(text="secret", tokens=[2])
        assert (await asking).status_code == 200
        assert (await http.delete(path)).json()["deleted"]
        assert [key async for key in client.redis.scan_iter(f"*{attempt.claim.job_id}*")] == []

        asking, attempt, path = await begin()
        await attempt.fail(ErrorCode.INVALID_GRAMMAR)
        assert (await asking).status_code == 400
        assert (await http.delete(path)).json()["deleted"]

        monkeypatch.setattr(responses, "CANCEL_WAIT_S", 0.1)
        _, attempt, path = await begin(background=True)
        assert (await http.delete(path)).json()["deleted"], "the worker will end the job"
        assert (await http.get(path)).status_code == 404
        await attempt.finish(FinishReason.CANCELLED)


async def test_the_deletion_of_a_response_whose_job_has_expired_keeps_a_later_job_with_its_key(
    redis_url: str, queue: str
) -> None:
    body, headers = {"input": "hi", "background": True}, {"Idempotency-Key": queue}
    async with gateway(redis_url, queue) as (url, _, client), httpx.AsyncClient(base_url=url, timeout=60) as http:
        first = (await http.post(RESPONSES, json=body, headers=headers)).json()["id"]
        await client.redis.delete(client.keys.of_job(first.removeprefix(ID_PREFIX)).job)
        later = [(await http.post(RESPONSES, json=body, headers=headers)).json()["id"]]
        assert (await http.delete(f"{RESPONSES}/{first}")).json()["deleted"]
        later.append((await http.post(RESPONSES, json=body, headers=headers)).json()["id"])
    assert first != later[0] == later[1]


@pytest.mark.parametrize("path", [RESPONSES, f"{RESPONSES}/input_tokens"])
async def test_too_many_messages_are_refused_by_the_name_of_their_field(redis_url: str, queue: str, path: str) -> None:
    items = [{"role": "user", "content": "a"}] * MAX_MESSAGES
    async with gateway(redis_url, queue) as (url, _, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        for body in ({"input": [*items, *items[:1]]}, {"input": items, "instructions": "b"}):
            error = (await http.post(path, json=body)).json()["error"]
            assert error["param"] == "input"
            assert error["message"].endswith("4097 messages are more than 4096")


@pytest.mark.parametrize(("value", "is_stream"), [("true", True), ("1", True), ("false", False), ("0", False)])
async def test_a_boolean_of_the_query_has_four_values(redis_url: str, queue: str, value: str, is_stream: bool) -> None:
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post(RESPONSES, json={"input": "hi"}))
        await (await worker.start_next()).finish(text="Hello", tokens=[2])
        path = f"{RESPONSES}/{(await asking).json()['id']}"
        answer = await http.get(path, params={"stream": value})
        assert answer.headers["content-type"].startswith("text/event-stream") == is_stream
        for name, place in (("stream", path), ("fail_on_no_slot", "/slots")):
            refused = await http.get(place, params={name: value.capitalize() + "?"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {"type": None}, {}])
async def test_references_mean_the_items_of_stored_responses(
    redis_url: str, queue: str, kind: dict[str, str | None]
) -> None:
    async with gateway(redis_url, queue) as (url, worker, client), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post(RESPONSES, json={"input": "hi"}))
        await (await worker.start_next()).finish(text="Hello", tokens=[2])
        first = (await asking).json()
        (asked,) = (await http.get(f"{RESPONSES}/{first['id']}/input_items")).json()["data"]
        items = [{**kind, "id": item["id"]} for item in (asked, *first["output"])]
        asking = asyncio.create_task(http.post(RESPONSES, json={"input": [*items, {"role": "user", "content": "Bye"}]}))
        attempt = await worker.start_next()
        await attempt.finish(text="Bye", tokens=[2])
        answer = await asking
        store = ResponseStore(client.redis, client.keys, 60)
        with pytest.raises(RequestRefused, match=r"input\.0"):
            await with_referenced_items({"input": items}, None, store, "another key")  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    turns = [(message.role, message.content) for message in attempt.request.messages or ()]
    assert turns == [("user", "hi"), ("assistant", "Hello"), ("user", "Bye")]


async def test_a_response_that_is_too_large_to_store_is_400_and_has_no_job(redis_url: str, queue: str) -> None:
    async with gateway(redis_url, queue) as (url, _, client), httpx.AsyncClient(base_url=url, timeout=60) as http:
        tool = {"type": "function", "name": "f", "description": "x" * client.settings.max_request_bytes}
        body = {"input": "hi", "background": True, "tools": [tool], "tool_choice": "none"}
        refused = await http.post(RESPONSES, json=body)
        depth = await client.queue_depth()
        unstored = {**body, "store": False, "background": False, "stream": True}
        async with http.stream("POST", RESPONSES, json=unstored) as answer:
            assert answer.status_code == 200
    assert (refused.status_code, depth.waiting) == (400, 0)
    assert "more than max_request_bytes=" in refused.json()["error"]["message"]


@pytest.mark.parametrize("item_id", ["", "msg", "msg_x_1", "msg_default.0." + "0" * 32 + "_0", "rs_../../x_0"])
async def test_a_reference_to_no_stored_item_is_404_and_names_it(redis_url: str, queue: str, item_id: str) -> None:
    body = {"input": [{"type": "item_reference", "id": item_id}]}
    async with gateway(redis_url, queue) as (url, _, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.post(RESPONSES, json=body)
    assert answer.status_code == 404
    assert f"input.0: there is no stored item {item_id!r}" in answer.json()["error"]["message"]
