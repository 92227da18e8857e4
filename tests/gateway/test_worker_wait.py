"""The answer to a job that has ended needs a worker, and the queue has none any more: it waits for one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.gateway.test_disconnects import gateway
from tests.support.http_server import post_of, sending

from llamaq.common.errors import LlamaqError, NoWorker, WorkerEnded
from llamaq.common.protocol.text_commands import TextReply
from llamaq.gateway import worker_wait
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.responses.answer_reader import AnswerReader
from llamaq.gateway.routes import responses
from llamaq.producer.queries import text_commands

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hi", "return_token_ids": True}


@pytest.mark.parametrize(("waits", "status"), [(True, 200), (False, 503)])
async def test_an_answer_waits_for_a_worker_if_requests_do(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, waits: bool, status: int
) -> None:
    missing: list[LlamaqError] = [NoWorker(queue), WorkerEnded("killed"), NoWorker(queue)]

    async def ask(*_: object, **__: object) -> TextReply:
        if missing:
            raise missing.pop()
        return TextReply(tokens=(5, 6))

    monkeypatch.setattr(worker_wait, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(text_commands, "ask", ask)
    async with (
        gateway(redis_url, queue, wait_for_worker=waits) as (url, worker, _),
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        asking = asyncio.create_task(http.post(COMPLETIONS, json={**BODY, "model": queue}))
        await (await worker.start_next()).finish(text="Hello", tokens=[2])
        answer = await asking
    assert answer.status_code == status, answer.text
    assert ('"prompt_token_ids":[5,6]' in answer.text) == waits
    assert len(missing) == (0 if waits else 2)


async def test_a_stream_with_token_ids_asks_for_those_of_its_prompt_when_a_worker_has_begun(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_asked = 0

    async def ask(*_: object, **__: object) -> TextReply:
        nonlocal n_asked
        n_asked += 1
        return TextReply(tokens=(5, 6))

    monkeypatch.setattr(text_commands, "ask", ask)
    posted = post_of(COMPLETIONS, {**BODY, "model": queue, "stream": True, "n": 2})
    async with gateway(redis_url, queue, ping_s=0.05) as (url, worker, _), sending(url, posted) as (reader, _):
        await reader.readuntil(b": queued, 0 ahead\n\n")
        assert n_asked == 0
        attempts = [await worker.start_next() for _ in range(2)]
        for attempt in attempts:
            await attempt.finish(text="Hello", tokens=[2])
        events = (await reader.readuntil(b"[DONE]")).decode()
    assert events.count('"prompt_token_ids":[5,6]') == 2
    assert n_asked == 1


async def test_a_stored_response_that_is_read_as_a_stream_waits_only_while_it_runs(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[bool] = []

    def reader(models: ModelKnowledge, *args: Any) -> AnswerReader:
        waits.append(models.waits)
        return AnswerReader(models, *args)

    monkeypatch.setattr(responses, "AnswerReader", reader)
    async with (
        gateway(redis_url, queue, wait_for_worker=True) as (url, worker, _),
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        begun = (await http.post("/v1/responses", json={"input": "hi", "background": True})).json()
        path = f"/v1/responses/{begun['id']}?stream=true"
        reading = asyncio.create_task(http.get(path))
        attempt = await worker.start_next()
        while not waits:  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.01)
        await attempt.finish(text="Hello", tokens=[2])
        assert "response.completed" in (await reading).text
        assert "response.completed" in (await http.get(path)).text
    assert waits == [True, False]


@pytest.mark.parametrize(("timeout_s", "n_asked"), [(60.0, 3), (0.0, 1)])
async def test_the_wait_for_a_worker_ends_with_the_timeout_of_the_request(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, n_asked: int
) -> None:
    monkeypatch.setattr(worker_wait, "FIRST_PAUSE_S", 0.01)
    asked: list[set[int]] = []

    class Pieces:
        async def of(self, _: object, tokens: set[int]) -> dict[int, bytes]:
            asked.append(tokens)
            if len(asked) < 3:
                raise NoWorker("q")
            return {1: b"a"}

    pieces: Any = Pieces()
    client: Any = SimpleNamespace(settings=SimpleNamespace(timeout_s=timeout_s))
    models = ModelKnowledge(pieces, pieces, pieces, waits=True)
    if n_asked == 3:
        assert await models.token_bytes(client, {1}) == {1: b"a"}
    else:
        with pytest.raises(NoWorker):
            await models.token_bytes(client, {1})
    assert len(asked) == n_asked
