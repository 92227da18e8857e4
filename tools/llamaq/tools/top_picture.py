"""Draws the picture of `llamaq top` in the README as an SVG. It shows two queues and three workers in a real run.

python -m llamaq.tools.top_picture docs/top.svg
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from llamaq.cli.top.app import TopApp
from llamaq.cli.top.live_queues import LiveQueues
from llamaq.producer import AsyncClient
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings
from llamaq.worker_cli.demo import demo_jobs

COLUMNS, LINES = 96, 24
SLOTS_PAGE = "2"
INTERVAL_S = 1.0
N_ENDED = 20
"""The picture is drawn when this number of jobs have ended, so that all rates are known."""
WORKERS = (("chat", 8), ("chat", 4), ("reports", 4))
"""The queue and the number of slots of each worker."""
WAITING = {"chat": 60, "reports": 40}
"""Number of jobs that are submitted to each queue."""


async def submit(url: str) -> None:
    """Submit the jobs of all queues, interactive ones and bulk ones."""
    prompts = demo_jobs(8)
    for queue, n_jobs in WAITING.items():
        async with AsyncClient(url, queue) as client:
            for number in range(n_jobs):
                options = {**prompts[number % len(prompts)].params, "max_tokens": 200, "ignore_eos": True}
                options["priority"] = "bulk" if queue == "reports" else "interactive"
                await client.submit(**options)


async def draw(url: str) -> str:
    """Run the view, and return what it shows as an SVG."""
    async with AsyncClient(url) as client:
        while sum([queue.workers for queue in await client.queues()]) < len(WORKERS):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(INTERVAL_S)
        await submit(url)
        view = TopApp(LiveQueues(client), "redis.example.com:6379", INTERVAL_S)
        async with view.run_test(size=(COLUMNS, LINES)) as pilot:
            await pilot.press(SLOTS_PAGE)
            while view.overview is None or len(view.overview.recent) < N_ENDED:
                await pilot.pause(INTERVAL_S / 10)
            return view.export_screenshot(title="llamaq top")


def main(path: Path) -> None:
    """Start a Redis and the workers, and draw the picture."""
    with EmbeddedRedis() as redis:
        supervisor = Supervisor(
            [
                WorkerSettings(
                    redis_url=redis.url, queue=queue, n_parallel=n_slots, n_threads=1, heartbeat_s=0.5, drain_s=0
                )
                for queue, n_slots in WORKERS
            ]
        )
        supervisor.start()
        try:
            path.write_text(asyncio.run(draw(redis.url)))
        finally:
            supervisor.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
