"""Draws the picture in the README as an SVG. It shows the view of `llamaq demo` in the middle of a real run.

python -m llamaq.tools.demo_picture docs/demo.svg
"""

from __future__ import annotations

import asyncio
import sys
import time
from io import StringIO
from pathlib import Path

from rich.console import Console

from llamaq.producer import AsyncClient
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings
from llamaq.worker_cli.demo import demo_jobs
from llamaq.worker_cli.demo_view import DemoJob, DemoView

COLUMNS, LINES = 100, 26
N_JOBS = 8
SHOWN_TOKENS = 260
"""The picture is drawn when all jobs together have generated this number of tokens. Most jobs still run then."""
POLL_S = 0.002


async def run_until(client: AsyncClient, view: DemoView, n_tokens: int) -> None:
    """Run the jobs of the view until they have generated `n_tokens` together."""
    async with client:
        while not await client.workers():  # noqa: ASYNC110 - the worker is another process
            await asyncio.sleep(POLL_S)
        view.started_s = time.monotonic()
        tasks = [asyncio.create_task(follow(client, job)) for job in view.jobs]
        while view.n_tokens < n_tokens and not all(task.done() for task in tasks):
            view.worker = (await client.workers())[0]
            await asyncio.sleep(POLL_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def follow(client: AsyncClient, job: DemoJob) -> None:
    """Submit one job and add its chunks to the view."""
    submitted = await client.submit(**job.params)
    async for chunk in submitted.stream():
        job.text += chunk.text
        job.n_tokens += len(chunk.tokens)
    result = await submitted.result()
    job.stats, job.ending = result.stats, result.finish_reason.value


def draw(path: Path) -> None:
    """Run the demo on the demo model and write the picture to `path`."""
    view = DemoView(demo_jobs(N_JOBS))
    with EmbeddedRedis() as redis:
        supervisor = Supervisor([WorkerSettings(redis_url=redis.url, n_parallel=N_JOBS, n_threads=1, heartbeat_s=0.02)])
        supervisor.start()
        try:
            asyncio.run(run_until(AsyncClient(redis.url), view, SHOWN_TOKENS))
        finally:
            supervisor.stop()
    console = Console(record=True, width=COLUMNS, height=LINES, file=StringIO(), force_terminal=True)
    console.print(view)
    console.save_svg(str(path), title="llamaq demo", unique_id="llamaq-demo")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
