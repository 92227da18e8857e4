"""API keys: who may send requests, to which queues, how many, and what the jobs of a key are given."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.api_keys import bearer, key_store
from tests.support.command_line import failing, llamaq
from tests.support.http_server import post_of, sending, serving_http
from tests.support.shifted_clock import with_clock
from tests.support.worker_cards import announce_card

from llamaq.common.errors import InvalidSettings
from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.queue_and_worker_state import LoraScale
from llamaq.common.redis.connect import connect
from llamaq.gateway.app import build_app
from llamaq.gateway.http_keys import HttpKeys
from llamaq.gateway.keys import key_store as key_store_module
from llamaq.gateway.keys.key_file import read_keys
from llamaq.gateway.keys.key_record import KeyRecord, hash_of
from llamaq.gateway.settings import serve_settings
from llamaq.producer.testing import FakeWorker, fake_embedding

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def answering(redis_url: str, queue: str, **settings: Any) -> AsyncIterator[tuple[str, list[JobRequest]]]:
    """A server that requires keys, and a worker that answers. Yield the URL and the requests of its jobs."""
    requests: list[JobRequest] = []

    def answer(request: JobRequest) -> list[str]:
        requests.append(request)
        return ["ok"]

    async with (
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        serving_http(redis_url, queue, key_prefix=queue, require_key=True, **settings) as url,
    ):
        serving = asyncio.create_task(worker.serve(answer))
        try:
            yield url, requests
        finally:
            serving.cancel()
            await asyncio.wait([serving])


async def test_only_requests_with_a_valid_key_pass(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_store_module, "FRESH_S", 0.0)
    async with key_store(redis_url, queue) as store, answering(redis_url, queue) as (url, requests):
        secret = await store.add(name="alice", requests_per_minute=1000)
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            missing = await http.post(CHAT, json=HELLO)
            wrong = await http.post(CHAT, json=HELLO, headers=bearer(secret + "x"))
            passed = await http.post(CHAT, json=HELLO, headers=bearer(secret))
            also = await http.post("/v1/messages", json={**HELLO, "model": queue}, headers={"x-api-key": secret})
            healthy = await http.get("/health")
            assert await store.revoke("alice")
            revoked = await http.get("/v1/models", headers=bearer(secret))
    assert [each.status_code for each in (missing, wrong, passed, also, healthy, revoked)] == [
        401,
        401,
        200,
        200,
        200,
        401,
    ]
    assert missing.json()["error"]["code"] == "invalid_api_key"
    assert [(each.tenant, each.cache_salt, each.cache_public) for each in requests] == [("alice", "alice", 0)] * 2


async def test_a_damaged_record_does_not_keep_other_keys_from_being_managed(redis_url: str, queue: str) -> None:
    redis = connect(redis_url, name="test")
    await redis.hset(HttpKeys(queue).http_keys(), mapping={b"\xff": b"junk", hash_of("secret"): b"{}"})
    async with key_store(redis_url, queue) as store:
        secret = await store.add(name="alice")
        assert [record.name for record in await store.list()] == ["alice"]
        assert [await store.find(each) is not None for each in (secret, "secret")] == [True, False]
        assert await store.revoke("alice")
        assert await store.list() == []
    await redis.aclose()


async def test_a_key_has_queues_a_priority_and_a_salt(redis_url: str, queue: str) -> None:
    async with key_store(redis_url, queue) as store, answering(redis_url, queue) as (url, requests):
        elsewhere = await store.add(name="elsewhere", queues=("other",))
        batch = await store.add(name="batch", queues=(queue,), priority="bulk", cache_salt="team")
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            refused = await http.post(CHAT, json=HELLO, headers=bearer(elsewhere))
            passed = await http.post(CHAT, json={**HELLO, "cache_salt": "mine"}, headers=bearer(batch))
            models = [(await http.get("/v1/models", headers=bearer(key))).json()["data"] for key in (elsewhere, batch)]
    assert (refused.status_code, passed.status_code) == (403, 200)
    assert [len(each) for each in models] == [0, 1]
    assert (requests[0].priority, requests[0].cache_salt) == ("bulk", "team/mine")


def test_no_request_can_choose_the_salt_of_another_key() -> None:
    keys = [KeyRecord(name="a", cache_salt=salt, created_ms=0) for salt in ("", "x", "/x", "x/y", "x~1y", "~", "/")]
    keys += [KeyRecord(name="alice", created_ms=0), KeyRecord(name="x.y", created_ms=0)]
    salts = ["", "x", "y", "alice", "/x", "x/y", "~1y", "/"]
    pairs = [(key, salt) for key in keys for salt in salts]
    found = {key.job_options({"cache_salt": salt})["cache_salt"] for key, salt in pairs}
    assert len(found) == len(pairs)
    assert [key.job_options({})["cache_salt"] for key in (keys[0], keys[1], keys[-2])] == ["", "x", "alice"]


async def test_a_request_cannot_share_more_cells_with_other_keys_than_its_key_allows(
    redis_url: str, queue: str
) -> None:
    bodies = [(CHAT, HELLO), (CHAT, {**HELLO, "cache_public": 100_000}), (CHAT, {**HELLO, "cache_public": 0})]
    bodies += [("/v1/completions", {"prompt": [1, 2], "cache_public": public}) for public in (100_000, "system")]
    async with key_store(redis_url, queue) as store, answering(redis_url, queue) as (url, requests):
        secrets = [
            await store.add(name="alone"),
            await store.add(name="unsalted", cache_salt=""),
            await store.add(name="sharing", share_system_prompt=True),
        ]
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            statuses = [
                (await http.post(path, json=body, headers=bearer(secret))).status_code
                for secret in secrets
                for path, body in bodies
            ]
    assert statuses == [200] * 15
    assert [each.cache_public for each in requests] == [0] * 10 + ["system", 0, 0, 0, 0]


async def test_only_a_key_that_may_manage_slots_acts_on_them(redis_url: str, queue: str) -> None:
    async with (
        key_store(redis_url, queue) as store,
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        serving_http(redis_url, queue, key_prefix=queue, require_key=True) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await worker.announce()
        plain = bearer(await store.add(name="plain"))
        manager = bearer(await store.add(name="manager", manage_slots=True))
        actions = [f"/slots/0?action={action}" for action in ("save", "restore", "erase")]
        refused = [await http.post(path, headers=plain) for path in actions]
        allowed = await http.post("/slots/0?action=erase", headers=manager)
    assert [(each.status_code, each.json()["error"]["code"]) for each in refused] == [(403, "slots_not_allowed")] * 3
    assert (allowed.status_code, allowed.json()["error"]["param"]) == (400, "id_slot")  # this worker has no slots


def test_a_key_that_an_older_version_has_stored_shares_nothing() -> None:
    stored = '{"name":"a","queues":[],"priority":"interactive","max_open":null,"cache_salt":null,"created_ms":0}'
    assert "cache_public" not in KeyRecord.model_validate_json(stored).job_options(HELLO)


async def test_a_key_has_limits_that_all_servers_share(redis_url: str, queue: str) -> None:
    async with (
        key_store(redis_url, queue) as store,
        serving_http(redis_url, queue, key_prefix=queue, require_key=True) as first,
        serving_http(redis_url, queue, key_prefix=queue, require_key=True) as second,
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        httpx.AsyncClient(timeout=60) as http,
    ):
        rated = bearer(await store.add(name="rated", requests_per_minute=3))
        statuses = [(await http.get(f"{url}/v1/models", headers=rated)).status_code for url in (first, second) * 2]
        limited = await http.get(f"{first}/v1/models", headers=rated)
        assert statuses == [200, 200, 200, 429]
        assert 1 <= int(limited.headers["retry-after"]) <= 20
        await worker.announce()
        narrow = bearer(await store.add(name="narrow", max_open=1))
        async with sending(first, post_of(CHAT, {**HELLO, "stream": True}, **narrow)) as (_, writer):
            attempt = await worker.start_next()
            assert (await http.get(f"{second}/v1/models", headers=narrow)).status_code == 429
            writer.transport.abort()
            while (await http.get(f"{second}/v1/models", headers=narrow)).status_code == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await attempt.finish()


async def test_a_key_is_not_refused_for_longer_after_the_clock_of_redis_was_set_back(
    redis_url: str, queue: str
) -> None:
    async with key_store(redis_url, queue) as store:
        rated, narrow = (
            KeyRecord(name=name, created_ms=0, **limit)
            for name, limit in (("rated", {"requests_per_minute": 2}), ("narrow", {"max_open": 1}))
        )
        before = copy.copy(store)
        before._admit = with_clock(store._admit, 3600)
        assert [await before.admit(rated, request_id) > 0 for request_id in "abc"] == [False, False, True]
        assert [await before.admit(narrow, request_id) > 0 for request_id in "ab"] == [False, True]
        assert [await store.admit(rated, request_id) > 0 for request_id in "def"] == [False, False, True]
        assert await store.admit(rated, "e") == 0, "an open request is not counted again"
        assert await store.admit(narrow, "c") > 0, "the open request has the usual time for its renewal"
        later = copy.copy(store)
        later._admit = with_clock(store._admit, 61)
        assert await later.admit(narrow, "c") == 0, "the server of the open request was killed"


def test_the_command_adds_lists_and_revokes_keys(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_KEY_PREFIX", queue)
    permissions = ("--share-system-prompt", "--manage-slots")
    secret = llamaq("keys", "add", "alice", "--queues", "a, b", "--max-open", "2", *permissions).strip()
    assert secret.startswith("llamaq-alice-")
    assert "there is a key 'alice'" in failing(monkeypatch, capsys, "keys", "add", "alice", code=2)
    assert "name:" in failing(monkeypatch, capsys, "keys", "add", "two words", code=2)
    listed = json.loads(llamaq("keys", "list", "--json"))
    assert (listed["name"], listed["queues"], listed["max_open"]) == ("alice", ["a", "b"], 2)
    shown = llamaq("keys", "list")
    assert "share_system_prompt,manage_slots" in shown
    assert secret not in shown + json.dumps(listed)
    assert json.loads(llamaq("keys", "revoke", "alice", "--json")) == {"name": "alice"}
    assert "no key 'alice'" in failing(monkeypatch, capsys, "keys", "revoke", "alice", code=2)
    assert llamaq("keys", "list") == "no keys\n"
    added = json.loads(llamaq("keys", "add", "alice", "--json"))
    assert added["key"].startswith("llamaq-alice-")
    assert (added["name"], llamaq("keys", "revoke", "alice")) == ("alice", "")


async def test_a_server_knows_the_keys_of_a_file_and_reads_it_again(
    redis_url: str, queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    alice = llamaq("keys", "add", "alice", "--file", str(file)).strip()
    assert alice not in file.read_text()
    assert "has a key 'alice'" in failing(monkeypatch, capsys, "keys", "add", "alice", "--file", str(file), code=2)
    settings = {"key_prefix": queue, "require_key": True, "keys_file": file}
    async with serving_http(redis_url, queue, **settings) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def status_of(secret: str) -> int:
            return (await http.get("/v1/models", headers=bearer(secret))).status_code

        assert [await status_of(alice), await status_of("x")] == [200, 401]
        bob = llamaq("keys", "add", "bob", "--file", str(file)).strip()
        assert [await status_of(alice), await status_of(bob)] == [200, 200]
        file.write_text("damaged")
        assert await status_of(bob) == 200
        file.write_text("{}")
        assert await status_of(bob) == 401
    with pytest.raises(InvalidSettings, match="keys_file: without require_key"):
        serve_settings(keys_file=file)
    file.write_text("damaged")
    with pytest.raises(InvalidSettings, match=r"was not written by `llamaq keys add --file`"):
        build_app(serve_settings(keys_file=file, require_key=True))


@pytest.mark.parametrize(
    ("content", "why"),
    [("TOP-SECRET", "Invalid JSON: expected value"), ('{"TOP-SECRET": 5}', "Input should be an obj")],
)
def test_the_error_for_another_file_is_one_line_without_its_content(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "keys.json").write_text(content)
    with pytest.raises(InvalidSettings, match=f"was not written by `llamaq keys add --file`: {why}") as caught:
        read_keys(tmp_path / "keys.json")
    assert "SECRET" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_stored_hash_does_not_contain_the_key() -> None:
    record = KeyRecord(name="a", created_ms=0)
    assert len(hash_of("secret")) == 64
    assert "secret" not in record.model_dump_json()


async def test_embeddings_without_a_model_use_a_queue_that_the_key_allows(redis_url: str, queue: str) -> None:
    texts = f"{queue}-texts"
    async with (
        key_store(redis_url, queue) as store,
        answering(redis_url, queue) as (url, _),
        FakeWorker(redis_url, texts, key_prefix=queue) as worker,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await announce_card(worker, kind=JobKind.EMBEDDING)
        http.headers.update(bearer(await store.add(name="bob", queues=[texts])))
        asking = asyncio.create_task(http.post("/v1/embeddings", json={"input": "hi"}))
        attempt = await asyncio.wait_for(worker.start_next(), 30)
        await attempt.finish(embeddings=[fake_embedding("hi")])
        assert (await asking).status_code == 200
        assert (await http.post(CHAT, json=HELLO)).status_code == 403
        assert (await http.post("/v1/embeddings", json={"input": "hi", "model": queue})).status_code == 403


async def test_a_key_finds_models_and_adapters_only_in_its_queues(redis_url: str, queue: str) -> None:
    """An adapter of a queue with an earlier name neither hides that of an allowed queue, nor is it revealed."""
    secret, own = f"{queue}-1", f"{queue}-2"
    terms, hidden = LoraScale(name="terms.gguf", scale=0.5), LoraScale(name="hidden.gguf", scale=1)
    async with (
        key_store(redis_url, queue) as store,
        FakeWorker(redis_url, secret, name="first", key_prefix=queue) as other,
        FakeWorker(redis_url, own, name="second", key_prefix=queue) as worker,
        serving_http(redis_url, own, key_prefix=queue, require_key=True) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await announce_card(other, model="base", lora=(hidden, terms.model_copy(update={"scale": 1})))
        await announce_card(worker, model="base", lora=(terms,))
        http.headers.update(bearer(await store.add(name="bob", queues=[own])))
        ids = [each["id"] for each in (await http.get("/v1/models")).json()["data"]]
        shown = (await http.get("/v1/models/terms")).json()
        for model, lora in (("terms", {"terms.gguf": 0.5}), ("base", None)):
            asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi", "model": model}))
            attempt = await asyncio.wait_for(worker.start_next(), 30)
            await attempt.finish(text="ok", tokens=[1])
            assert (await asking).status_code == 200
            assert attempt.request.lora == lora
        answers = {
            model: await http.post("/v1/completions", json={"prompt": "hi", "model": model})
            for model in ("hidden", "hidden.gguf", "nothing", secret)
        }
        missing = await http.get("/v1/models/hidden")
    assert ids == [own, "terms"]
    assert shown["parent"] == own
    assert [each.status_code for each in answers.values()] == [404, 404, 404, 403]
    assert answers["hidden"].text.replace("hidden", "nothing") == answers["nothing"].text
    assert missing.status_code == 404
