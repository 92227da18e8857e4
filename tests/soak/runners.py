"""Runs long jobs on several workers that are killed or stopped, and finds out which worker runs which job."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.soak.chaos import VOCABULARY, JobShape
from tests.soak.checker import Checker
from tests.soak.environment import POLL_S, Environment, WorkerProcess
from tests.soak.load import collect, record_published, run_job, run_jobs

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Started
from llamaq.common.protocol.job_outcome import JobState
from llamaq.producer import AsyncClient

MAX_TOKENS = 1000
"""With ticks of `TICK_S`, a job takes about ten seconds. When a job has finished, a new job starts."""
TICK_S = 0.01
N_SLOTS = 8
"""Slots of each worker. Half of them stay free, so that a worker can take the jobs of a dead worker."""


@dataclass(eq=False)
class Runners:
    """Keeps a constant number of jobs running, each with one reader."""

    environment: Environment
    client: AsyncClient
    checker: Checker
    rng: random.Random
    width: int
    is_over: bool = False

    async def keep_running(self) -> None:
        """Run until `end` is called and the last job has ended."""
        await run_jobs(self._one_job, width=self.width, wants_more=lambda *_: not self.is_over)

    async def _one_job(self) -> None:
        tokens = self.rng.choices(VOCABULARY, k=self.rng.randint(8, 64))
        options = {"tokens": tokens, "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": self.rng.getrandbits(32)}
        demands = {"n_tokens": MAX_TOKENS, "may_be_short": True}
        await run_job(self.client, self.checker, JobShape(options, demands=demands))

    async def end(self) -> None:
        """Start no more jobs, and cancel the running ones."""
        self.is_over = True
        for job_id in list(self.checker.accepted):
            await self.client.cancel(job_id)

    async def attempts_of(self, worker: WorkerProcess) -> dict[str, int]:
        """Return the attempt number of each running job of a worker."""
        worker_id = await worker.ready()
        hashes = await self._hashes(list(self.checker.accepted))
        return {
            job_id: attempt
            for job_id, (status, attempt, holder) in hashes.items()
            if (status, holder) == ("running", worker_id)
        }

    async def busiest(self) -> WorkerProcess:
        """Wait until all jobs run, and return the running worker with the most jobs."""
        while True:
            held = {worker: len(await self.attempts_of(worker)) for worker in self.environment.living}
            most = max(held.values(), default=0)
            if most and sum(held.values()) >= self.width:
                return self.rng.choice([worker for worker, count in held.items() if count == most])
            await asyncio.sleep(POLL_S)

    async def await_next_attempts(self, held: dict[str, int], timeout_s: float) -> set[str]:
        """Wait until each of these jobs has a newer attempt. Returns the jobs that have none after the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            waiting = held.keys() - await self.newer_attempts(held)
            if not waiting or time.monotonic() > deadline_s:
                return waiting
            await asyncio.sleep(POLL_S)

    async def newer_attempts(self, held: dict[str, int]) -> set[str]:
        """Return the jobs that have a newer attempt than the given one, which has a slot."""
        hashes = await self._hashes(list(held))
        return {
            job_id
            for job_id, (status, attempt, _) in hashes.items()
            if attempt > held[job_id] and status != JobState.QUEUED
        }

    async def _hashes(self, job_ids: list[str]) -> dict[str, tuple[str, int, str]]:
        """Return status, attempt and worker of each job."""
        async with self.client.redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hmget(self.client.keys.of_job(job_id).job, "status", "attempt", "worker")
            replies = await pipe.execute()
        texts = [[(value or b"0").decode() for value in reply] for reply in replies]
        return {job_id: (text[0], int(text[1]), text[2]) for job_id, text in zip(job_ids, texts, strict=True)}

    async def started_s(self, job_id: str, after_attempt: int) -> float | None:
        """Return the start time of the next attempt, by the clock of Redis, or None."""
        entries: Any = await self.client.redis.xrange(self.client.keys.of_job(job_id).events)
        for entry_id, fields in entries:
            if b"started" in fields[b"e"]:  # decoding all `tokens` events would take long
                event = codec.decode_event(fields[b"e"])
                if isinstance(event, Started) and event.attempt > after_attempt:
                    return int(entry_id.split(b"-")[0]) / 1000
        return None


@asynccontextmanager
async def long_jobs(
    environment: Environment, checker: Checker, rng: random.Random, width: int
) -> AsyncIterator[Runners]:
    """Run long jobs on a random-weight model until the context ends, then record all stored events in the checker."""
    environment.use_random_model()
    environment.settings |= {"n_parallel": N_SLOTS, "n_ctx": 2 * N_SLOTS * MAX_TOKENS, "max_crashes": 1000}
    async with environment.client() as client, record_published(client, checker):
        runners = Runners(environment, client, checker, rng, width)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(runners.keep_running())
            yield runners
            await runners.end()
        await collect(client, checker)
