"""Which errors of an event loop end the I/O thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from redis.exceptions import RedisError

from llamaq.common.background_tasks import BackgroundTasks
from llamaq.common.errors import ProtocolError
from llamaq.common.protocol import codec
from llamaq.worker.broker.concurrent_calls import run_all
from llamaq.worker.process.lost_errors import LostErrors

WAIT_S = 10.0
TASKS = BackgroundTasks()


async def fail(error: Exception) -> None:
    raise error


def lose_in_callback() -> None:
    asyncio.get_running_loop().call_soon(codec.decode_event, b"no event")


def lose_in_callback_of_library() -> None:
    asyncio.get_running_loop().call_soon(json.loads, "{")


def lose_in_task() -> None:
    TASKS.start(run_all([fail(ProtocolError("expected"))]))


def lose_connection_in_task() -> None:
    TASKS.start(run_all([fail(RedisError("expected"))]))


@pytest.mark.parametrize("lose", [lose_in_callback, lose_in_task])
async def test_an_error_of_a_callback_or_of_a_background_task_is_raised(lose: Callable[[], None]) -> None:
    lost_errors = LostErrors(asyncio.get_running_loop())
    lose()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ProtocolError):
            await lost_errors.run()


@pytest.mark.parametrize("lose", [lose_in_callback_of_library, lose_connection_in_task])
async def test_an_error_of_a_library_and_an_outage_of_redis_are_only_logged(
    lose: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    lost_errors = LostErrors(asyncio.get_running_loop())
    lose()
    async with asyncio.timeout(WAIT_S):
        while not caplog.records:  # noqa: ASYNC110 - the log has no event
            await asyncio.sleep(0)
    waiting = asyncio.create_task(lost_errors.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
