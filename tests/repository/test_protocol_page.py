"""The client of docs/protocol.md runs as it is written, without the package llamaq."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis

from llamaq.producer.testing import FakeWorker, serving
from llamaq.worker.local.embedded_redis import EmbeddedRedis

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
TEXT = ["Zoë ", "und 🦙 ", "gehen."]
URL_OF_THE_PAGE = "redis://localhost:6379/0"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a Redis of its own, because the client of the page names the queue `default`."""
    with EmbeddedRedis() as server:
        yield server.url


def load(url: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """Run the client with the Redis at `url`. Returns its functions, and what it has printed."""
    (code,) = re.findall(r"<!-- test: client -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert URL_OF_THE_PAGE in code
    assert "llamaq." not in code, "the client imports the package"
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace(URL_OF_THE_PAGE, url), names)
    return names, printed.getvalue()


def test_the_client_submits_reads_resumes_and_cancels_jobs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(url, "default", lambda _: TEXT):
        client, printed = load(url, monkeypatch)
        assert printed == "".join(TEXT)
        job_id = client["submit"](prompt="tell", seed=7, metadata={"user": 42})
        assert "".join(client["stream"](job_id)) == "".join(TEXT)
        assert "".join(client["stream"](job_id, 10)) == "".join(TEXT)[10:]
    job_id = client["submit"](prompt="wait")
    with redis.Redis.from_url(url) as server:
        request = msgpack.unpackb(server.hget(f"llamaq:{{default:0}}:job:{job_id}", "request"))
    assert request["has_random_seed"], "the default seed of a worker replaces a seed that the client has drawn"
    client["cancel"](job_id)
    assert "".join(client["stream"](job_id)) == ""
    with pytest.raises(RuntimeError, match="the job does not exist"):
        list(client["stream"]("default.0." + "0" * 32))


def test_the_client_passes_all_keys_and_arguments_of_a_submit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(url, "default", lambda _: TEXT):
        client, _ = load(url, monkeypatch)
    passed: list[list[int]] = []

    def submit(keys: list[str], args: list[Any]) -> list[bytes]:
        passed.append([len(keys), len(args)])
        return [b"ok"]

    client["script"] = lambda _: submit
    client["submit"](prompt="tell")
    table = (client["SCRIPTS"] / "submit.lua").read_text()
    assert passed == [[len(re.findall(rf"^-- {name}\[", table, re.MULTILINE)) for name in ("KEYS", "ARGV")]]


async def test_the_client_reads_text_whose_message_it_has_missed_and_the_error_of_a_job(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(url, "default", lambda _: TEXT):
        client, _ = load(url, monkeypatch)
    job_id = client["submit"](prompt="wait")
    async with FakeWorker(url, "default") as worker:
        attempt = await worker.start_next()
        await attempt.emit([1], TEXT[0])
        texts = client["stream"](job_id)
        pieces = [await asyncio.to_thread(next, texts)]
        channel = f"llamaq:{{default:0}}:tokens:{job_id}"
        with redis.Redis.from_url(url) as server:  # the message after the missed one
            server.publish(channel, msgpack.packb({"type": "tokens", "offset": 5, "text_offset": 99, "text": "?"}))
        await attempt.emit([2], TEXT[1])
        await attempt.fail(message="broken on purpose")
        pieces.append(await asyncio.to_thread(next, texts))
        with pytest.raises(RuntimeError, match="broken on purpose"):
            await asyncio.to_thread(list, texts)
    assert "".join(pieces) == "".join(TEXT[:2])
