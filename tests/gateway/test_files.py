"""Files: uploads within their bounds, lists, contents, expiry; malformed forms; lines of any length."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError
from tests.support.batches import upload
from tests.support.http_server import sending, serving_http

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol.keys import Keys
from llamaq.common.redis.client import RetryingRedis
from llamaq.common.redis.connect import connect
from llamaq.common.redis.shared_round_trips import Command
from llamaq.gateway.batches.input_lines import read_lines
from llamaq.gateway.files import blocks
from llamaq.gateway.files import store as store_module
from llamaq.gateway.files.blocks import BLOCK_BYTES, compress, decompress
from llamaq.gateway.files.form_parts import FormParts
from llamaq.gateway.http.errors import RequestRefused, error_fields, status_of
from llamaq.gateway.http_keys import HttpKeys


async def test_a_file_is_stored_shown_listed_and_removed(redis_url: str, queue: str) -> None:
    content = os.urandom(3 * BLOCK_BYTES + 17)
    async with (
        serving_http(redis_url, queue, key_prefix=queue, max_body_bytes=2000) as first,
        serving_http(redis_url, queue, key_prefix=queue) as second,
        httpx.AsyncClient(base_url=first, timeout=60) as http,
        httpx.AsyncClient(base_url=second, timeout=60) as other,
    ):
        files = [(await upload(http, content)).json()]
        fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        files += [(await upload(http, each, **fields)).json() for each in (b"", b"x")]
        ids = [each["id"] for each in files]
        read = await other.get(f"/v1/files/{ids[0]}/content")
        shown = (await other.get(f"/v1/files/{ids[1]}")).json()
        pages = [
            (await http.get("/v1/files", params=params)).json()
            for params in ({"limit": 2}, {"limit": 2, "after": ids[1]}, {"order": "asc", "purpose": "batch"})
        ]
        removed = (await other.delete(f"/v1/files/{ids[0]}")).json()
        missing = [
            await http.get(f"/v1/files/{ids[0]}"),
            await http.get(f"/v1/files/{ids[0]}/content"),
            await http.delete(f"/v1/files/{ids[0]}"),
            await http.delete("/v1/files/x"),
            await http.get("/v1/batches/x"),
        ]
        wrong = [(await http.get("/v1/files", params={"limit": limit})).status_code for limit in ("0", "x", "99999")]
    assert read.content == content
    assert (files[0]["filename"], files[0]["bytes"], files[0]["object"]) == ("../../etc/in.jsonl", len(content), "file")
    assert shown == files[1]
    assert shown["expires_at"] - shown["created_at"] == 3600
    assert [[each["id"] for each in page["data"]] for page in pages] == [[ids[2], ids[1]], [ids[0]], ids]
    assert [page["has_more"] for page in pages] == [True, False, False]
    assert removed == {"id": ids[0], "object": "file", "deleted": True}
    assert [each.status_code for each in missing] == [404] * 5
    assert wrong == [400] * 3
    redis = connect(redis_url, name="test")
    contents = [key async for key in redis.scan_iter(f"{queue}:{{*}}:file")]
    assert len(contents) == 1  # the content of the removed file is deleted, and an empty file has no content
    assert await redis.ttl(contents[0]) <= 3600
    await redis.aclose()


async def test_uploads_have_bounds_and_leave_nothing_behind(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_FILES", 2)
    settings: dict[str, Any] = {"key_prefix": queue, "max_file_bytes": 500_000, "max_files_bytes": 600_000}

    async def chunks(end: bytes = b"") -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + end
        for _ in range(10):
            yield os.urandom(100_000)

    async with (
        serving_http(redis_url, queue, **settings) as url,
        serving_http(redis_url, queue, **settings, body_timeout_s=0.2) as impatient,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        form = {"Content-Type": "multipart/form-data; boundary=b"}
        announced = await upload(http, b"x" * 700_000)
        streamed = await http.post("/v1/files", content=chunks(), headers=form)
        followed = await http.post("/v1/files", content=chunks(b"\r\n--b--\r\n"), headers=form)
        malformed = [
            await http.post("/v1/files", content=b"x"),
            await http.post("/v1/files", content=b"x", headers=form),
            await http.post("/v1/files", content=b"--b--\r\n", headers=form),
            await http.post("/v1/files", content=b"", headers={"Content-Type": "multipart/form-data"}),
            await http.post("/v1/files", data={"purpose": "batch"}, files={"other": b"x"}),
            await upload(http, b"x", purpose="fine-tune"),
            await upload(http, b"x", **{"expires_after[seconds]": "60"}),
            await upload(http, b"x", **{f"field {number}": "" for number in range(20)}),
            await upload(http, b"x", long="x" * 5000),
            await http.post(
                "/v1/files", content=b"--b" + b"\r\nX: " + b"\r\nX: ".join([b"x" * 3000] * 4), headers=form
            ),
        ]
        begun = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        async with sending(impatient, begun + b"Content-Length: 999\r\n\r\n--b") as (reader, _):
            slow = await reader.readuntil(b"\r\n")
        async with sending(url, begun + b"Content-Length: 999\r\n\r\n--b"):
            pass  # the client leaves in the middle
        redis, keys = connect(redis_url, name="test"), HttpKeys(queue)
        while await redis.hlen(keys.http_files("")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        accepted = [await upload(http, b"x" * 400_000), await upload(http, b"x" * 250_000)]
        accepted += [await upload(http, b"x") for _ in range(2)]
        contents = [key async for key in redis.scan_iter(f"{queue}:{{*}}:file*")]
        await redis.aclose()
    for too_large in (announced, streamed, followed):
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "file_too_large")
    assert [each.status_code for each in malformed] == [400] * 10
    assert "headers" in malformed[-1].text
    assert b" 408 " in slow
    assert [each.status_code for each in accepted] == [200, 413, 200, 413]
    assert accepted[1].json()["error"]["code"] == "file_quota_exceeded"
    assert len(contents) == 2


@pytest.mark.parametrize(
    ("n_bytes", "content_type", "status"),
    [
        (700_000, "multipart/form-data; boundary=b", b"413"),
        (400_000, "multipart/form-data; boundary=b", b"413"),
        (100, "text/plain", b"400"),
    ],
)
async def test_the_body_of_an_upload_that_is_refused_by_its_headers_is_not_asked_for(
    redis_url: str, queue: str, n_bytes: int, content_type: str, status: bytes
) -> None:
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\nContent-Length: {n_bytes}\r\n"
    begun = head.encode() + b"Expect: 100-continue\r\n\r\n"
    settings: dict[str, Any] = {"key_prefix": queue, "max_file_bytes": 500_000, "max_files_bytes": 300_000}
    async with serving_http(redis_url, queue, **settings) as url, sending(url, begun) as (reader, _):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 " + status), "no `100 Continue`"
    assert b"connection: close\r\n" in answer.lower()


async def test_a_client_that_waits_for_100_continue_uploads_its_file(redis_url: str, queue: str) -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n--b--\r\n'
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    head += b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(form)
    async with (
        serving_http(redis_url, queue, key_prefix=queue) as url,
        sending(url, head) as (reader, writer),
    ):
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(form)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_a_damaged_record_does_not_prevent_uploads(redis_url: str, queue: str) -> None:
    redis, keys = connect(redis_url, name="test"), HttpKeys(queue)
    await redis.hset(keys.http_files(""), "file-junk", "junk")
    async with (
        serving_http(redis_url, queue, key_prefix=queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        stored = (await upload(http, b"x")).json()
        listed = (await http.get("/v1/files")).json()
        damaged = await http.get("/v1/files/file-junk")
    assert [each["id"] for each in listed["data"]] == [stored["id"]]
    assert damaged.status_code == 404
    await redis.aclose()


async def test_a_file_is_stored_once_although_the_reply_of_redis_is_lost(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, lost = RetryingRedis.send_pipeline, []

    async def send_and_lose(client: RetryingRedis, commands: Sequence[Command], transaction: bool) -> Any:
        replies = await send(client, commands, transaction)
        if commands not in lost and any(args[0] == "RPUSH" for args, _ in commands):
            lost.append(commands)
            raise RedisConnectionError("the connection broke after the commands were executed")
        return replies

    monkeypatch.setattr(RetryingRedis, "send_pipeline", send_and_lose)
    redis = connect(redis_url, name="test", failover_s=0)
    store = store_module.FileStore(redis, Keys(), queue, max_files_bytes=2**30)
    writing = await store.begin_upload(2**20)
    parts = [os.urandom(BLOCK_BYTES + 1), b"the end"]
    for part in parts:
        await writing.write(part)
    record = await writing.finish("a.txt", "user_data", 60)
    assert b"".join([block async for block in store.read(record)]) == b"".join(parts)
    assert len(lost) == 2
    await redis.aclose()


async def test_a_file_that_is_deleted_while_it_is_read_ends_the_connection(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocks, "BLOCKS_AT_ONCE", 1)
    async with (
        serving_http(redis_url, queue, key_prefix=queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        file_id = (await upload(http, os.urandom(40 * BLOCK_BYTES))).json()["id"]

        async def read_and_delete() -> None:
            async with http.stream("GET", f"/v1/files/{file_id}/content") as answer:
                parts = answer.aiter_bytes()
                await anext(parts)
                await http.delete(f"/v1/files/{file_id}")
                async for _ in parts:
                    pass

        with pytest.raises(httpx.RemoteProtocolError):
            await read_and_delete()
    assert "file.deleted_while_read" in caplog.text or "without completing" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_full_redis_is_named() -> None:
    error = OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
    fields = error_fields(error)
    assert (status_of(error), fields["code"]) == (503, "redis_full")
    assert "maxmemory" in fields["message"]


@given(st.binary(max_size=300), st.integers(1, 40))
def test_a_form_is_the_same_however_it_is_cut(content: bytes, size: int) -> None:
    if b"--b" in content:
        return
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a\x01.jsonl"\r\n\r\n'
        + content
        + b"\r\n--b--\r\n"
    )
    form = FormParts("multipart/form-data; boundary=b")
    read = b"".join(form.feed(body[start : start + size]) for start in range(0, len(body), size))
    assert (read, form.fields, form.filename, form.is_complete) == (content, {"purpose": "batch"}, "a.jsonl", True)


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        (b"my %22best%22 rows.jsonl", 'my "best" rows.jsonl'),
        (b"a%0D%0Ab%41%25.jsonl", "ab%41%25.jsonl"),
        (b'my \\"best\\" rows.jsonl', 'my "best" rows.jsonl'),
    ],
)
def test_a_file_name_is_unescaped_as_browsers_escape_it(sent: bytes, name: str) -> None:
    form = FormParts("multipart/form-data; boundary=b")
    form.feed(b'--b\r\nContent-Disposition: form-data; name="file"; filename="' + sent + b'"\r\n\r\nx\r\n--b--\r\n')
    assert form.filename == name


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    form = FormParts("multipart/form-data; boundary=b")
    try:
        form.feed(b"--b" + body)
    except RequestRefused as exc:
        assert exc.http_status == 400  # noqa: PT017


def lines_in(content: bytes, size: int, longest: int) -> list[tuple[int, bytes | None]]:
    async def blocks() -> AsyncIterator[bytes]:
        for start in range(0, len(content), size):
            yield content[start : start + size]

    async def collect() -> list[tuple[int, bytes | None]]:
        return [each async for each in read_lines(blocks(), longest)]

    return asyncio.run(collect())


@given(st.lists(st.sampled_from([b"", b" ", b"a", b"bc", b"d" * 30]), max_size=12), st.integers(1, 50))
def test_lines_are_the_same_however_the_blocks_are_cut(lines: list[bytes], size: int) -> None:
    expected = [(number, line if len(line) < 30 else None) for number, line in enumerate(lines, 1) if line.strip()]
    assert lines_in(b"\n".join(lines), size, 20) == expected


async def test_a_block_that_is_damaged_or_too_large_is_refused() -> None:
    (block,) = await compress(b"x" * BLOCK_BYTES)
    assert decompress(block) == b"x" * BLOCK_BYTES
    bomb = zlib.compress(bytes(100 * BLOCK_BYTES))
    for damaged in (b"", b"x", block[:-9], bomb):
        with pytest.raises(ProtocolError):
            decompress(damaged)
