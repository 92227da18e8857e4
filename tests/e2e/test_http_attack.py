"""Bad requests to `llamaq serve`, in front of a real worker: the small form of `make attack-serve`."""

from __future__ import annotations

import asyncio
import random
import re
from typing import TYPE_CHECKING

import httpx
from tests.support.bad_uploads import MAX_FILE_BYTES
from tests.support.http_attack import MAX_BODY_BYTES, PATIENCE_S, Attacker, complaint_about, run_attack
from tests.support.http_server import serving_http

from llamaq.producer import AsyncClient

if TYPE_CHECKING:
    from tests.e2e.conftest import ServedQueue

N_ATTACKS, WIDTH = 150, 15
LIMITS = {
    "max_body_bytes": MAX_BODY_BYTES,
    "max_file_bytes": MAX_FILE_BYTES,
    "header_timeout_s": PATIENCE_S,
    "body_timeout_s": PATIENCE_S,
}


async def test_bad_requests_show_no_defect_and_leave_no_task_and_no_job(demo: ServedQueue) -> None:
    async with (
        serving_http(demo.url, demo.queue, **LIMITS) as url,
        AsyncClient(demo.url, demo.queue) as client,
    ):
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            description = (await http.get("/openapi.json")).json()
            begun = asyncio.create_task(http.get("/health"))
            while not tasks_of_requests():  # noqa: ASYNC110  # the server runs in this event loop
                await asyncio.sleep(0)
            await begun
        attacker = Attacker(description, demo.queue, random.Random(7))
        left = (attacker.draw() for _ in range(N_ATTACKS))

        async def attack() -> list[str]:
            complaints = []
            for each in left:
                answer = await run_attack(url, each)
                attacker.learn(answer)
                complaints.append(complaint_about(each, answer))
            return [found for found in complaints if found is not None]

        found = await asyncio.gather(*(attack() for _ in range(WIDTH)))
        assert not [complaint for some in found for complaint in some]

        async def is_idle() -> bool:
            depth, (worker,) = await client.queue_depth(), await client.workers()
            return not depth.waiting + depth.running and all(slot.job_id is None for slot in worker.slots)

        while not await is_idle() or tasks_of_requests():  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.05)


def tasks_of_requests() -> list[str]:
    """Return what the server's tasks run that belong to a request."""
    running = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
    return [name for name in running if re.search("run_asgi|_run_until_disconnect|EventStream|Generation", name)]
