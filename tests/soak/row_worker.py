"""A fake worker that ends jobs as fast as Redis allows: `python row_worker.py URL QUEUE`, until it is killed.

The answer to a prompt is the prompt itself.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from redis.exceptions import ResponseError

from llamaq.common.protocol.script_types import MAX_JOBS_IN_CALL, Attempt, JobEntry
from llamaq.producer.testing import FakeAttempt, FakeWorker

IDLE_S, FULL_S = 0.005, 0.1
LEASE_MS = 10_000
"""The rows of a killed worker start again after this time."""


async def serve(url: str, queue: str) -> None:
    """Answer the jobs of the queue."""
    async with FakeWorker(url, queue) as worker:
        await worker.announce(ttl_s=3600)
        stream = worker._streams[1]  # bulk jobs
        while True:
            claims: list[JobEntry] = []
            with suppress(ResponseError):  # Redis is full
                claims = [
                    JobEntry(entry.fields[b"id"].decode(), stream, entry.entry_id.decode())
                    for entry in await worker.claim_scripts.read_unclaimed(stream, MAX_JOBS_IN_CALL, LEASE_MS)
                ]
            await asyncio.gather(*(_answer(worker, claim) for claim in claims))
            if not claims:
                await asyncio.sleep(IDLE_S)


async def _answer(worker: FakeWorker, claim: JobEntry) -> None:
    """Answer a job. While Redis is full, this is tried again."""
    while True:
        try:
            claimed = await worker.claim_scripts.claim_job(claim, worker.name, LEASE_MS)
            if isinstance(claimed, Attempt):
                attempt = FakeAttempt(worker, claim, claimed)
                await attempt.finish(tokens=[1, 2], text=attempt.request.prompt or "")
        except ResponseError:
            await asyncio.sleep(FULL_S)
        else:
            return


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:3]))
