"""`/tokenize` of a server whose workers have an older version."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgpack
import pytest
from tests.support.http_server import serving_http

from llamaq.common.protocol import codec
from llamaq.common.protocol.text_commands import TextCommand
from llamaq.producer.testing import FakeWorker


@pytest.mark.parametrize(
    ("fields", "known", "status"),
    [({}, {}, 200), ({"parse_special": True}, {}, 200), ({"parse_special": False}, {}, 501),
     ({"parse_special": False}, {"parse_special": False}, 200)],
)  # fmt: skip
async def test_a_worker_that_does_not_know_parse_special_does_not_ignore_it_silently(
    redis_url: str, queue: str, fields: dict[str, Any], known: dict[str, Any], status: int
) -> None:
    async with (
        FakeWorker(redis_url, queue, name=queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await worker.announce()
        asking = asyncio.create_task(http.post("/tokenize", json={"content": "<s>", **fields}))
        found: Any = await worker.redis.blpop([worker.keys.text_commands(worker.name)], timeout=30)
        command = codec.decode_model(TextCommand, found[1])
        reply = msgpack.packb({"tokens": [7], **known})
        await worker.redis.rpush(worker.keys.reply(command.id), reply)
        answer = await asking
    assert command.parse_special is fields.get("parse_special", True)
    assert answer.status_code == status
    if status == 200:
        assert answer.json() == {"tokens": [7]}
    else:
        assert answer.json()["error"]["param"] == "parse_special"


async def test_parse_special_is_a_boolean(redis_url: str, queue: str) -> None:
    async with (
        FakeWorker(redis_url, queue, name=queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await worker.announce()
        refused = await http.post("/tokenize", json={"content": "<s>", "parse_special": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "parse_special")
