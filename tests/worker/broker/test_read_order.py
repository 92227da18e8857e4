"""Jobs reach the engine in the order in which they were submitted, although several are prepared at the same time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.worker.broker.test_suspects import BytePreparer, until, working

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import Priority
from llamaq.producer import AsyncClient
from llamaq.worker.broker import read_order
from llamaq.worker.broker.read_order import ReadOrder


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> dict[str, threading.Event]:
    """The job with the prompt `slow` is prepared when its event is set. The other events are set by their jobs."""
    events = {name: threading.Event() for name in ("running", "slow", "quick", "bulk")}
    prepare = BytePreparer.prepare

    def prepare_slowly(self: BytePreparer, payload: bytes, *args: Any) -> Any:
        prompt = codec.decode_request(payload, codec.MAX_EVENT_BYTES).prompt or ""
        if prompt == "slow":
            assert events[prompt].wait(timeout=60)
        outcome = prepare(self, payload, *args)
        events[prompt].set()
        return outcome

    monkeypatch.setattr(BytePreparer, "prepare", prepare_slowly)
    return events


@pytest.mark.parametrize("has_patience", [True, False])
async def test_a_job_waits_for_an_earlier_one_of_its_priority_that_takes_longer_to_prepare(
    redis_url: str,
    queue: str,
    prepared: dict[str, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
    has_patience: bool,
) -> None:
    monkeypatch.setattr(read_order, "MAX_WAIT_S", 60.0 if has_patience else 0.01)
    async with (
        AsyncClient(redis_url, queue) as client,
        working(redis_url, queue, capacity=4, n_slots=1, n_threads=2) as worker,
    ):
        await client.submit("running")
        await until(lambda: len(worker.history) == 1)
        slow, quick = [await client.submit(prompt) for prompt in ("slow", "quick")]
        bulk = await client.submit("bulk", priority="bulk")
        await until(prepared["bulk"].is_set)
        await until(lambda: bulk.id in worker.history)
        if has_patience:
            assert worker.history[1:] == [bulk.id], "the quick job is prepared, and waits for the slow one"
        else:
            await until(lambda: quick.id in worker.history)
        prepared["slow"].set()
        await until(lambda: len(worker.history) == 4)
        in_order = [slow.id, quick.id] if has_patience else [quick.id, slow.id]
        assert [job_id for job_id in worker.history if job_id in in_order] == in_order


async def test_a_job_does_not_wait_while_each_claimed_job_has_a_slot(
    redis_url: str, queue: str, prepared: dict[str, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_order, "MAX_WAIT_S", 60.0)
    async with (
        AsyncClient(redis_url, queue) as client,
        working(redis_url, queue, capacity=4, n_slots=2, n_threads=2) as worker,
    ):
        slow, quick = [await client.submit(prompt) for prompt in ("slow", "quick")]
        await until(lambda: worker.history == [quick.id])
        prepared["slow"].set()
        await until(lambda: worker.history == [quick.id, slow.id])


async def test_a_place_whose_job_did_not_reach_the_engine_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_order, "MAX_WAIT_S", 60.0)
    order = ReadOrder()
    first, second, third = [order.enter(Priority.INTERACTIVE) for _ in range(3)]
    assert repr(order) == "<ReadOrder interactive=3 bulk=0>"
    order.leave(second)
    order.leave(first)
    await order.wait_turn(third)
    order.leave(third)
    order.leave(third)
    assert repr(order) == "<ReadOrder interactive=0 bulk=0>"
