"""What the server refuses: malformed, oversized and slow requests, full queues, queues without a worker."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from tests.support.http_server import post_of, sending, serving_http, watch_received
from tests.support.loop_clock import advance_loop_clock
from tests.support.worker_cards import announce_card

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import ErrorCode, InvalidSettings, JobFailed
from llamaq.common.protocol.embedding_task import JobKind, Pooling
from llamaq.gateway.http.errors import RequestRefused, error_response
from llamaq.gateway.http.json_body import MAX_DEPTH, decode_object
from llamaq.gateway.prepared.completion import PreparedCompletion
from llamaq.gateway.settings import serve_settings
from llamaq.producer import AsyncClient
from llamaq.producer.testing import FakeWorker

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", ["/slots", "/props", "/lora-adapters"])
async def test_what_only_a_worker_knows_is_503_without_a_worker(redis_url: str, queue: str, path: str) -> None:
    """llama-server also answers so while it loads its model. An empty list would say that there is no adapter."""
    async with serving_http(redis_url, queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
    assert int(answer.headers["retry-after"]) > 0


async def test_a_full_queue_is_429_and_tells_when_to_try_again(redis_url: str, queue: str) -> None:
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await worker.announce()
        await client.redis.hset(client.keys.config(queue, 0), mapping={"max_queue": "1", "partitions": "1"})
        await client.submit("x")
        for stream in (True, False):
            full = await http.post(CHAT, json={**HELLO, "stream": stream})
            assert full.status_code == 429
            assert full.headers["retry-after"] == "1"
            assert full.json()["error"]["code"] == "queue_full"
        several = await http.post(CHAT, json={**HELLO, "n": 2})
        assert several.status_code == 429
        assert (await client.queue_depth()).waiting == 1


async def test_a_request_whose_answers_do_not_all_fit_into_the_queue_leaves_no_job_there(
    redis_url: str, queue: str
) -> None:
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await worker.announce()
        await client.redis.hset(client.keys.config(queue, 0), mapping={"max_queue": "2", "partitions": "1"})
        for options in ({}, {"stream": True}, {"stream": True, "store": True}):
            full = await http.post(CHAT, json={**HELLO, **options, "n": 4})
            assert full.json()["error"]["code"] == "queue_full"
            assert (await client.queue_depth()).waiting == 0


async def test_a_queue_without_a_worker_is_503_if_requests_do_not_wait(redis_url: str, queue: str) -> None:
    async with (
        serving_http(redis_url, queue, wait_for_worker=False) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        refused = await http.post(CHAT, json=HELLO)
        unknown = await http.post(CHAT, json={**HELLO, "model": "no-such-queue"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["code"] == "no_worker"
    assert unknown.status_code == 404


MALFORMED = [
    b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b'{"a":' * 5000,
    b'{"messages": []}', b'{"messages": "hi"}', b'{"messages": [1]}', b'{"messages": [{"role": 1}]}',
    b'{"messages": [{"role": "user"}]}', b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"messages": 1e999}', b'{"a": [0, "x", {"b": [-1e999]}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"a": [' + b"[], " * 200_000 + b"1]}",
]  # fmt: skip
WRONG_FIELDS: list[dict[str, Any]] = [
    {"n": 0}, {"n": "x"}, {"n": True}, {"n": 10**6}, {"n": 10**400}, {"stream": 1}, {"temperature": "hot"},
    {"stop": [""]}, {"stop": 5}, {"seed": 10**400}, {"logit_bias": [1]},
    {"logit_bias": {"1": "b"}}, {"response_format": {"type": "xml"}}, {"response_format": "json"},
    {"structured_outputs": 1}, {"structured_outputs": {"sql": 1}}, {"metadata": "x"}, {"max_tokens": -2},
    {"max_tokens": 1, "n_predict": 2}, {"tools": [{"type": "function"}]}, {"priority": "high"},
    {"delay_s": 5}, {"run_at": 1}, {"delay_s": 5, "store": True},
    {"grammar": "root ::= 1", "response_format": {"type": "json_object"}},
]  # fmt: skip


async def test_a_malformed_body_is_400(redis_url: str, queue: str) -> None:
    async with serving_http(redis_url, queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        for body in MALFORMED:
            refused = await http.post(CHAT, content=body)
            assert refused.status_code == 400, body[:50]
            assert set(refused.json()["error"]) == {"message", "type", "code", "param"}


@pytest.mark.parametrize(
    ("path", "code"), [("/completion", "prompt_too_long"), ("/v1/completions", "context_length_exceeded")]
)
def test_the_error_of_a_job_has_the_code_of_the_api(path: str, code: str) -> None:
    scope = {"type": "http", "path": path, "headers": []}
    answer = error_response(JobFailed(ErrorCode.PROMPT_TOO_LONG, "too long", "q.0.1"), scope)
    assert json.loads(bytes(answer.body))["error"]["code"] == code


@pytest.mark.parametrize(("depth", "is_valid"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
def test_a_body_has_at_most_64_levels(depth: int, is_valid: bool) -> None:
    text = b'{"wide": [[], []], "deep": ' + b"[" * (depth - 1) + b"1" + b"]" * (depth - 1) + b"}"
    with nullcontext() if is_valid else pytest.raises(RequestRefused, match="nested more than 64 levels deep"):
        decode_object(text)


@pytest.mark.parametrize(
    ("path", "n_texts", "error"),
    [("/v1/embeddings", 1, "do not pool"), ("/embeddings", 33, "at most 32 texts"), ("/embeddings", 32, None)],
)
async def test_workers_that_do_not_pool_embed_up_to_32_texts_in_the_form_of_llama_server(
    redis_url: str, queue: str, path: str, n_texts: int, error: str | None
) -> None:
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await announce_card(worker, kind=JobKind.EMBEDDING, pooling=Pooling.NONE)
        asking = asyncio.create_task(http.post(path, json={"input": ["x"] * n_texts}))
        if error is None:
            await worker.start_next()
            await cancel_tasks(asking)
        else:
            refused = await asking
            assert (refused.status_code, error in refused.json()["error"]["message"]) == (400, True), refused.text


async def test_a_number_that_no_float_can_represent_is_400(redis_url: str, queue: str) -> None:
    body = b'{"input": "hi", "background": true, "metadata": {"a": [0.5, 1e999]}}'
    async with serving_http(redis_url, queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        refused = await http.post("/v1/responses", content=body)
        accepted = await http.post("/v1/responses", content=body.replace(b"1e999", b"1e308"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")
    assert accepted.json()["metadata"] == {"a": [0.5, 1e308]}


@pytest.mark.parametrize("slot", ["1" * 4301, "9", "-1", "x"])
async def test_a_slot_that_does_not_exist_is_400(redis_url: str, queue: str, slot: str) -> None:
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await worker.announce()
        refused = await http.post(f"/slots/{slot}?action=erase")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "id_slot")


async def test_a_byte_order_mark_and_integers_with_a_decimal_point_are_accepted(redis_url: str, queue: str) -> None:
    body = {"prompt": "hi", "n": 2.0, "seed": 7.0, "logprobs": 1.0, "max_tokens": 3.0, "temperature": 0.5}
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        sending(url, post_of("/v1/completions", body)),
    ):
        await worker.announce()
        requests = [(await worker.start_next()).request for _ in range(2)]
        assert {request.seed for request in requests} == {7, 8}
        assert all((request.logprobs, request.max_tokens, request.temperature) == (1, 3, 0.5) for request in requests)
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            marked = await http.post("/v1/completions", content=b"\xef\xbb\xbf" + b'{"prompt": "hi", "n": 0.0}')
            of_responses = await http.post("/v1/responses", json={"input": "hi", "top_logprobs": 99.0})
        assert "n: a number from 1" in marked.json()["error"]["message"]
        assert of_responses.json()["error"]["param"] == "logprobs"


async def test_a_compressed_body_is_415_and_the_encoding_named(redis_url: str, queue: str) -> None:
    async with serving_http(redis_url, queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = gzip.compress(b"{}")
        refused = [
            await http.post(path, content=body, headers={"Content-Encoding": "gzip"}) for path in (CHAT, "/v1/messages")
        ]
        plain = await http.post(CHAT, content=b"{}", headers={"Content-Encoding": "identity"})
    assert [each.status_code for each in (*refused, plain)] == [415, 415, 400]
    assert all("'gzip'" in each.json()["error"]["message"] for each in refused)


async def test_a_length_below_1_has_the_name_that_the_request_has_for_it(redis_url: str, queue: str) -> None:
    async with serving_http(redis_url, queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        refused = [
            await http.post(CHAT, json={**HELLO, "max_completion_tokens": 0}),
            await http.post("/v1/responses", json={"input": "hi", "max_output_tokens": -5}),
            await http.post(CHAT, json={**HELLO, "max_tokens": -2}),
        ]
    assert [each.json()["error"]["param"] for each in refused] == [
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
    ]


async def test_a_wrong_field_is_400_and_named(redis_url: str, queue: str) -> None:
    async with serving_http(redis_url, queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        for field in WRONG_FIELDS:
            # The repr, because json.dumps refuses a number of 400 digits.
            text = repr({**HELLO, **field}).replace("'", '"').replace("True", "true")
            refused = await http.post(CHAT, content=text)
            assert refused.status_code == 400, field
            assert next(iter(field)) in refused.json()["error"]["message"] or "number" in refused.text, field


async def test_a_body_has_a_largest_size_and_a_longest_time(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    until_received = watch_received(monkeypatch)
    async with (
        serving_http(redis_url, queue, max_body_bytes=2000) as url,
        serving_http(redis_url, queue, body_timeout_s=0.2) as url_of_bodies,
        serving_http(redis_url, queue, header_timeout_s=60) as url_of_headers,
    ):
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            announced = await http.post(CHAT, content=b"x" * 2001)

            async def chunks() -> Any:
                for _ in range(30):
                    yield b"x" * 100

            streamed = await http.post(CHAT, content=chunks())
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        async with sending(url_of_bodies, begun + b"Content-Length: 9\r\n\r\n{") as (reader, _):
            slow_body = await reader.readuntil(b"\r\n")
        async with sending(url_of_headers, begun) as (reader, _):
            await until_received(begun)
            advance_loop_clock(monkeypatch, 60)
            slow_headers = await reader.read()
    assert announced.status_code == streamed.status_code == 413
    assert announced.json()["error"]["code"] == "body_too_large"
    assert b" 408 " in slow_body
    assert slow_headers == b""


async def test_a_refused_request_has_a_longest_time_for_the_rest_of_its_body(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    until_received = watch_received(monkeypatch)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    async with (
        serving_http(redis_url, queue, require_key=True, header_timeout_s=60, body_timeout_s=600) as url,
        sending(url, head) as (reader, writer),
    ):
        await reader.readuntil(b"invalid_api_key")
        writer.write(b"{")
        await until_received(b"{")
        advance_loop_clock(monkeypatch, 60)
        await reader.read()  # to the end of the connection


async def test_data_after_the_last_request_of_a_connection_are_ignored(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    until_received = watch_received(monkeypatch)
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        sending(url, post_of(CHAT, HELLO, Connection="close")) as (reader, writer),
    ):
        await worker.announce()
        attempt = await worker.start_next()
        writer.write(b"\r\n")
        await until_received(b"\r\n")
        await attempt.finish(text="the answer", tokens=[1])
        assert b"the answer" in await reader.read()


@pytest.mark.parametrize(("chunk", "n_chunks", "status"), [(b" ", 10_001, 400), (b" " * 33, 10_001, 200)])
async def test_a_body_in_very_many_tiny_chunks_is_refused(
    redis_url: str, queue: str, chunk: bytes, n_chunks: int, status: int
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = head + b"%x\r\n%b\r\n" % (len(chunk), chunk) * n_chunks
    if status == 200:  # a refused client has sent nothing more, so that it reads the answer before a reset
        data += b'10\r\n{"prompt": "hi"}\r\n0\r\n\r\n'
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        sending(url, data) as (reader, writer),
    ):
        await worker.announce()
        if status == 200:
            await (await worker.start_next()).finish(text="the answer", tokens=[1])
        assert f" {status} ".encode() in await reader.readuntil(b"\r\n")
        writer.transport.abort()


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_the_offer_of_another_protocol_is_ignored(
    redis_url: str, queue: str, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_http(redis_url, queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.get("/health", headers={"Connection": "Upgrade", "Upgrade": protocol})
    assert answer.status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "origins",
    [
        *("https://a.example http://b.example", "https://a.example/", "chat.example.org", "HTTPS://a.example"),
        *("https://*.example.org", "https://Chat.example.org", "https://a.example:443", "http://a.example:80"),
    ],
)
def test_a_setting_of_cors_that_no_browser_sends_is_refused(origins: str) -> None:
    with pytest.raises(InvalidSettings, match=r"--cors-origins .* is no origin such as https://chat\.example\.org"):
        serve_settings(cors_origins=origins)


def test_all_kinds_of_origins_may_be_listed() -> None:
    origins = (
        "*",
        "localhost",
        "null",
        "http://10.0.0.1:3000",
        "http://[::1]",
        "http://a.example:443",
        "chrome-extension://abcdef",
    )
    assert serve_settings(cors_origins=",".join(origins)).cors_origins == origins


async def test_every_response_has_the_id_of_its_request_and_the_headers_of_cors(redis_url: str, queue: str) -> None:
    origin = "https://chat.example.org"
    async with (
        serving_http(redis_url, queue, cors_origins=origin) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers={"Origin": origin}) as http,
    ):
        given = await http.get("/health", headers={"X-Request-Id": "my-id"})
        bad = await http.get("/health", headers={"X-Request-Id": "my id"})
        refused = await http.post(CHAT, content=b"{")
        of_messages = await http.post("/v1/messages", content=b"{")
        missing = await http.get("/no-such-path")
        wrong_method = await http.get(CHAT)
        asked = await http.options(CHAT, headers={"Access-Control-Request-Method": "POST"})
    assert given.headers["x-request-id"] == "my-id"
    assert bad.headers["x-request-id"].startswith("req_")
    assert [each.status_code for each in (refused, missing, wrong_method, asked)] == [400, 404, 405, 200]
    for each in (given, refused, missing, wrong_method):
        assert each.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in each.headers
        assert each.headers["request-id"] == each.headers["x-request-id"]
        assert "Request-Id" in each.headers["access-control-expose-headers"].split(", ")
    assert missing.json()["error"]["type"] == "not_found_error"
    assert of_messages.json()["request_id"] == of_messages.headers["request-id"]


async def test_the_response_to_a_defect_of_the_server_has_the_headers_of_every_response(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr(PreparedCompletion, "read", broken)
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue, cors_origins=("*",)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await worker.announce()
        headers = {"X-Request-Id": "my-id", "Origin": "https://chat.example"}
        answer = await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "my-id")
    assert answer.headers["access-control-allow-origin"]
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.slow
async def test_an_unreachable_redis_is_503() -> None:
    async with serving_http("redis://127.0.0.1:1/0", "q") as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        answers = await asyncio.gather(http.get("/health"), http.post(CHAT, json=HELLO))
    assert [each.status_code for each in answers] == [503, 503]
    assert "127.0.0.1" not in answers[0].text
