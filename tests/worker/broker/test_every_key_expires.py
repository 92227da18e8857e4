"""After any history of jobs, each key of their queue expires or is documented as permanent, and no entry is left."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from tests.support.job_claims import claims_of, worker_queue
from tests.support.worker_scripts import worker_scripts

from llamaq.common.errors import LlamaqError
from llamaq.common.protocol import codec
from llamaq.common.protocol.end_expired_jobs import end_expired
from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.keys import GROUP
from llamaq.common.protocol.script_types import DueJobs, JobEntry, TerminalWrite
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeWorker
from llamaq.worker.broker.job_claims import ClaimedJob
from llamaq.worker.broker.upkeep_scripts import UpkeepScripts

PERMANENT = frozenset({"config", "sweep", "metrics", "dead", "stats", "jobs:interactive", "jobs:bulk"})
"""The keys of a queue without an expiry, after all jobs have ended, as `docs/protocol.md` lists them."""
EXPIRED_IDLE_MS, TRUSTED_MS = 10**11, 2**52
BROKEN = Failed(code="internal", message="broken on purpose")
PAUSES: dict[str, tuple[float, ...]] = dict.fromkeys(("delay_s", "queue_timeout_s", "deadline_s"), (0.003, 3600))
OPTIONS: dict[str, tuple[Any, ...]] = PAUSES | {
    "tenant": ("a", "b"), "idempotency_key": ("x", "y"), "retries": (1, 2), "priority": ("bulk",), "stream": (False,),
    "cancel_on_disconnect": (True,),
}  # fmt: skip


class History:
    """Random calls of clients, of two workers, and of another program that deletes the hashes of jobs."""

    def __init__(self, seed: int, client: AsyncClient, workers: list[FakeWorker]) -> None:
        self.random = random.Random(seed)
        self.client = client
        self.workers = workers
        self.jobs: list[AsyncJob] = []
        self.attempts: list[FakeAttempt] = []
        self.scripts = JobScripts(client.redis, client.keys)
        self.upkeep = UpkeepScripts(worker_queue(client))
        self.streams = [client.keys.jobs(client.queue, 0, priority) for priority in Priority]
        self.claims = {worker.name: claims_of(worker, max_crashes=2) for worker in workers}

    async def run(self, n_calls: int) -> None:
        often = [self.submit, self.claim, self.emit]
        calls: list[Callable[[], Awaitable[Any]]] = [*often, *often, *often, self.finish, self.fail, self.retry]
        calls += [self.requeue, self.preempt, self.cancel, self.change_priority, self.end_due, self.release]
        calls += [self.leave, self.reclaim, self.move, self.retry_dead, self.purge_dead, self.pause, self.purge]
        calls += [self.sweep, self.delete_hash, self.end_abandoned]
        for call in self.random.choices(calls, k=n_calls):
            with suppress(LlamaqError):  # the queue is draining, or the job does not exist
                await call()

    async def end_all(self) -> None:
        """End all jobs, as workers and clients do when the leases have expired."""
        redis, keys = self.client.redis, self.client.keys
        await self.client.resume()
        for _ in range(3):
            await self.sweep()
            await self.end_due()
            pattern = keys.of_job(f"{self.client.queue}.0.{'0' * 32}").job[:-32] + "*"
            for key in [key async for key in redis.scan_iter(pattern, count=1000)]:
                with suppress(LlamaqError):
                    await self.client.job(key.decode().rpartition(":")[2]).cancel()
            for attempt in self.attempts:
                await attempt.finish(FinishReason.CANCELLED)
            for worker in self.workers:
                await self.claim_with(worker, 100)
                await self.reclaim_with(worker, 100)
            for stream in self.streams:
                for pending in await redis.xpending_range(stream, GROUP, "-", "+", 1000):
                    entry: Any = [pending["message_id"]]
                    await redis.xclaim(stream, GROUP, "waiting", 0, entry, idle=EXPIRED_IDLE_MS, justid=True)

    # ---- clients

    async def submit(self) -> None:
        options = {name: self.random.choice(values) for name, values in OPTIONS.items() if self.random.random() < 0.3}
        self.jobs.append(await self.client.submit("hello", **options))

    async def cancel(self) -> None:
        await self._job().cancel()

    async def change_priority(self) -> None:
        await self.scripts.set_priority(self._job().id, self.random.choice(list(Priority)))

    async def pause(self) -> None:
        await self.random.choice([self.client.pause, self.client.drain, self.client.resume, self.client.resume])()

    async def purge(self) -> None:
        if self.random.random() < 0.2:
            await self.client.purge()

    async def retry_dead(self) -> None:
        for letter in (await self.client.dead_letters())[:1]:
            await self.client.retry_dead_letter(letter.id)

    async def purge_dead(self) -> None:
        for letter in (await self.client.dead_letters())[:1]:
            await self.client.purge_dead_letter(letter.id)

    async def delete_hash(self) -> None:
        await self.client.redis.delete(self.client.keys.of_job(self._job().id).job)

    # ---- workers

    async def claim(self) -> None:
        await self.claim_with(self.random.choice(self.workers), self.random.choice([1, 2]))

    async def claim_with(self, worker: FakeWorker, count: int) -> None:
        claims = self.claims[worker.name]
        for reply in await claims.read(count):
            await self._begin(worker, await claims.complete(reply))

    async def reclaim(self) -> None:
        await self.reclaim_with(self.random.choice(self.workers), 3)

    async def reclaim_with(self, worker: FakeWorker, count: int) -> None:
        claims = self.claims[worker.name]
        claims.observe(0, DueJobs(TRUSTED_MS, n_given=0, n_open=1, expired=[]), 0.0)
        for entry in await claims.reclaim(count):
            await claims.check_crash(entry)
            await self._begin(worker, await claims.claim_job(entry))

    async def move(self) -> None:
        worker = self.random.choice(self.workers)
        for attempt in self.attempts[-1:]:
            claim = attempt.claim
            moved = JobEntry(claim.job_id, claim.stream, claim.entry_id, attempt.number)
            await self._begin(worker, await self.claims[worker.name].claim_job(moved))

    async def _begin(self, worker: FakeWorker, claimed: ClaimedJob | None) -> None:
        if claimed is not None:
            attempt = FakeAttempt(worker, claimed.entry, claimed.attempt)
            self.attempts.append(attempt)
            if self.random.random() < 0.8:  # otherwise it waits for a slot
                await attempt.emit([], "")

    async def emit(self) -> None:
        await self._attempt().emit([1, 2], "ab")

    async def preempt(self) -> None:
        attempt = self._attempt()
        flush = replace(attempt.increment([3], "c"), has_slot=False)
        await attempt.worker.scripts.flush([flush], LEASE_MS, renew=True)

    async def finish(self) -> None:
        await self._attempt().finish(tokens=[4], text="d")

    async def fail(self) -> None:
        attempt = self._attempt()
        reason = self.random.choice(["", "a dead letter"])
        end = TerminalWrite(BROKEN, {"error": codec.encode_event(BROKEN)}, reason)
        await attempt.worker.scripts.finish(attempt.increment([5], "e"), end)

    async def retry(self) -> None:
        attempt = self._attempt()
        delay_s = self.random.choice([0.001, 100])
        await worker_scripts(attempt.worker).retry(
            attempt.increment(), BROKEN, first_delay_s=delay_s, max_delay_s=delay_s, share=1
        )

    async def requeue(self) -> None:
        attempt = self._attempt()
        crashed = self.random.random() < 0.5
        await worker_scripts(attempt.worker).requeue(attempt.claim, attempt.number, crashed=crashed)

    async def end_due(self) -> None:
        redis, keys, queue = self.client.redis, self.client.keys, self.client.queue
        due = await self.scripts.due_jobs(queue, 0, 100)
        await end_expired(redis, self.scripts, keys, queue, 0, due.expired)

    async def end_abandoned(self) -> None:
        await self.upkeep.end_abandoned(0, disconnect_s=0, max_late_s=1000, count=100)

    async def release(self) -> None:
        await self.upkeep.release_worker(0, self.random.choice(self.workers).name)

    async def leave(self) -> None:
        await self.upkeep.leave_group(0, self.random.choice(self.workers).name)

    async def sweep(self) -> None:
        await self.upkeep.sweep(0, list(self.claims), pause_s=0, n_keys=100_000)

    # ---- random objects

    def _job(self) -> AsyncJob:
        if not self.jobs:
            raise LlamaqError("no job was submitted")
        return self.random.choice(self.jobs)

    def _attempt(self) -> FakeAttempt:
        if not self.attempts:
            raise LlamaqError("no job was claimed")
        return self.random.choice(self.attempts)


async def keys_without_expiry(client: AsyncClient) -> list[str]:
    """Return the keys of the queue that nothing deletes, and the job streams that have entries."""
    redis, left = client.redis, []
    async for key in redis.scan_iter(f"llamaq:{{{client.queue}*", count=1000):
        name = key.decode().partition("}")[2][1:]
        if name in ("later", "deadlines", "watched"):  # a member without a job is removed when it is due
            members: Any = await redis.zrange(key, 0, -1)
            is_left = any([await redis.exists(client.keys.of_job(member.decode()).job) for member in members])
        elif name.startswith("jobs:"):
            is_left = bool(await redis.xlen(key)) or bool((await redis.xpending(key, GROUP))["pending"])
        else:
            is_left = await redis.pttl(key) == -1 and name not in PERMANENT
        left += [name] if is_left else []
    return left


@pytest.mark.parametrize("seed", range(20))
async def test_every_key_of_a_queue_expires_after_all_jobs_have_ended(redis_url: str, queue: str, seed: int) -> None:
    ttl_s, event_ttl_s = [(0.001, 0), (3600, 0), (3600, 60)][seed % 3]
    async with (
        AsyncClient(redis_url, queue, result_ttl_s=ttl_s, event_ttl_s=event_ttl_s) as client,
        FakeWorker(redis_url, queue, name="one") as one,
        FakeWorker(redis_url, queue, name="two") as two,
    ):
        history = History(seed, client, [one, two])
        for claims in history.claims.values():
            await claims.open()
        await history.run(80)
        await history.end_all()
        assert await keys_without_expiry(client) == []
