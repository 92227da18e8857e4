"""Suspects run apart: the claiming side of a worker on a real Redis, with an engine that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from llamaq.common.cancel_tasks import cancel_tasks
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.scripts import Attempt, Claim, Scripts
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker import intake as intake_module
from llamaq.worker.broker.inbox import Inbox
from llamaq.worker.broker.intake import Intake
from llamaq.worker.broker.job_progress import Checkpoints
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.core.job import Job, JobEnded, Lease, NewToken
from llamaq.worker.engine_loop.output_mailbox import OutputMailbox
from llamaq.worker.generation.job_preparer import PreparedJob
from llamaq.worker.testing.fake_engine import make_job

LEASE_S = 1.0


class BytePreparer:
    """Prepares without a model."""

    def prepare(self, payload: bytes, lease: Lease, published: Sequence[int], queue_ms: float) -> PreparedJob:
        request = codec.decode_request(payload, codec.MAX_EVENT_BYTES)
        job = make_job(request.prompt or "", job_id=lease.job_id, resumed=published)
        job.lease, job.request = lease, request
        return PreparedJob(job, ["" for _ in published])


@dataclass
class Rig:
    """A worker without an engine: the test generates tokens and ends jobs in its place."""

    name: str
    outbox: Outbox
    outputs: OutputMailbox
    admitted: dict[str, Job] = field(default_factory=dict)
    """Jobs that the engine would have, by id."""
    history: list[str] = field(default_factory=list)
    """Ids in the order in which the engine got them."""

    def generate(self, job: AsyncJob, token: int = 65) -> None:
        self.outputs.put([NewToken(self.admitted[job.id], token, "A")])

    def end(self, job: AsyncJob) -> None:
        self.outputs.put([JobEnded(self.admitted.pop(job.id), JobStats(), FinishReason.STOP)])

    def admit(self, job: Job) -> None:
        self.admitted[job.id] = job
        self.history.append(job.id)

    def cancel(self, job_id: str) -> None:
        """As the engine's controls."""

    def release(self, job_id: str, attempt: int) -> None:
        self.admitted.pop(job_id, None)


@asynccontextmanager
async def working(redis_url: str, queue: str, name: str = "w1", capacity: int = 8) -> AsyncIterator[Rig]:
    """The I/O side of a worker, which claims and flushes meanwhile."""
    async with FakeWorker(redis_url, queue, name=name) as connection:
        await connection.announce()
        rig = Rig(name, outbox=None, outputs=OutputMailbox())  # type: ignore[arg-type]  # they know each other
        inbox = Inbox(
            connection.redis, connection.keys,
            queue=queue, partitions=1, worker_id=name, lease_s=LEASE_S, max_crashes=2,
        )  # fmt: skip
        rig.outbox = outbox = Outbox(
            Scripts(connection.redis, connection.keys), name, rig, rig.outputs, lease_s=LEASE_S, disconnect_s=60,
            checkpoints=Checkpoints(1, 1.0), is_alive=lambda: True, on_finished=_ignore,
        )  # fmt: skip
        await inbox.open(max_queue=0)
        with ThreadPoolExecutor(1) as executor:
            intake = Intake(
                inbox, outbox, BytePreparer(), executor, rig.admit,  # type: ignore[arg-type]
                capacity=capacity, lease_s=LEASE_S, is_alive=lambda: True,
            )  # fmt: skip
            tasks = [asyncio.create_task(intake.run()), asyncio.create_task(outbox.run())]
            try:
                yield rig
            finally:
                await cancel_tasks(*tasks)
                await intake.close()
                await outbox.close()
                await inbox.close()


async def _ignore(_: JobStats) -> None:
    """Stats of finished jobs go nowhere."""


async def until(look: Callable[[], object]) -> None:
    while not look():  # noqa: ASYNC110  # Redis and a thread set it
        await asyncio.sleep(0.01)


async def until_true(look: Callable[[], Awaitable[object]]) -> None:
    while not await look():  # noqa: ASYNC110  # the same
        await asyncio.sleep(0.01)


async def suspect(client: AsyncClient, other: FakeWorker, **options: Any) -> AsyncJob:
    """A job that a worker died of, and that is anybody's now."""
    job = await client.submit("suspect", **options)
    claim = await other.claim()
    assert claim is not None
    assert isinstance(await other.scripts.start(claim, "dead"), Attempt)
    code = await other.scripts.settle(claim, "heir", had="dead", heartbeat_ms=0, dead_after_s=1, max_crashes=2)
    assert code == "suspect"
    assert await other.scripts.requeue(Claim(claim.job_id, claim.stream, claim.entry_id), None)
    return job


async def suspect_beside(client: AsyncClient, other: FakeWorker, rig: Rig) -> AsyncJob:
    """The same beside one job of a worker that has room for two: it takes the suspect when a second one has ended."""
    second = await client.submit("second")
    await until(lambda: second.id in rig.admitted)
    bad = await suspect(client, other)
    rig.end(second)
    return bad


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspects wait no longer than they must."""
    monkeypatch.setattr(intake_module, "MAX_SUSPECT_WAIT_S", 0.2)
    monkeypatch.setattr(intake_module, "BLOCK_S", 0.1)


async def test_nothing_else_is_begun_until_a_suspect_has_stored_a_token(
    redis_url: str, queue: str, impatient: None
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        bad = await suspect(client, other)
        async with working(redis_url, queue) as rig:
            await until(lambda: bad.id in rig.admitted)
            good = await client.submit("good")
            await asyncio.sleep(0.5)  # enough for several looks at the queue
            assert list(rig.admitted) == [bad.id]
            assert (await client.queue_depth()).waiting == 1
            rig.generate(bad)
            await until(lambda: good.id in rig.admitted)
            assert rig.history == [bad.id, good.id]


async def test_a_suspect_waits_for_those_that_run_and_then_they_are_handed_back(
    redis_url: str, queue: str, impatient: None
) -> None:
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as other,
        working(redis_url, queue, capacity=2) as rig,
    ):
        good = await client.submit("good")
        await until(lambda: good.id in rig.admitted)
        rig.generate(good)
        await until(lambda: rig.outbox.n_stored_tokens(good.id) == 1)
        bad = await suspect_beside(client, other, rig)
        await until(lambda: bad.id in rig.admitted)
        assert list(rig.admitted) == [bad.id]
        rig.generate(bad)
        await until(lambda: good.id in rig.admitted)
        assert rig.history[-2:] == [bad.id, good.id]
        assert rig.admitted[good.id].resumed == [65], "it goes on where it was"
        assert (await good.status()).crashes == 0


async def test_a_suspect_keeps_its_lease_while_it_waits(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "MAX_SUSPECT_WAIT_S", 60.0)
    monkeypatch.setattr(intake_module, "BLOCK_S", 0.1)
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as other,
        working(redis_url, queue, capacity=2) as rig,
    ):
        good = await client.submit("good")
        await until(lambda: good.id in rig.admitted)
        bad = await suspect_beside(client, other, rig)
        keys = client.keys.of_job(bad.id)

        async def is_claimed() -> bool:
            pending: Any = await other.redis.xpending_range(
                keys.interactive, "workers", "-", "+", 10, consumername=rig.name
            )
            return len(pending) == 2

        await until_true(is_claimed)
        await asyncio.sleep(1.5 * LEASE_S)  # the lease runs out, if nobody renews it
        taken: Any = await other.redis.xautoclaim(keys.interactive, "workers", "thief", int(LEASE_S * 1000))
        assert taken[1] == []
        rig.end(good)
        await until(lambda: bad.id in rig.admitted)
        assert rig.history[-1] == bad.id
        assert rig.history.count(bad.id) == 1


async def test_suspects_take_turns(redis_url: str, queue: str, impatient: None) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        bad = [await suspect(client, other, priority=priority) for priority in ("interactive", "bulk", "interactive")]
        async with working(redis_url, queue) as rig:
            proven: set[str] = set()
            while len(proven) < 3:
                await until(lambda: any(job.id in rig.admitted and job.id not in proven for job in bad))
                unproven = [job for job in bad if job.id in rig.admitted and job.id not in proven]
                assert len(unproven) == 1
                assert list(rig.admitted) == [unproven[0].id]
                rig.generate(unproven[0])
                proven.add(unproven[0].id)
            await until(lambda: len(rig.admitted) == 3)
            for job in bad:
                rig.end(job)
            for job in bad:
                assert (await job.result(timeout=10)).tokens == (65,)


async def test_a_suspect_goes_to_the_worker_that_is_idle(redis_url: str, queue: str, impatient: None) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        bad = [await suspect(client, other) for _ in range(2)]
        async with working(redis_url, queue) as rig:
            await until(lambda: len(rig.admitted) == 1)
            async with working(redis_url, queue, "w2") as second:
                await until(lambda: len(second.admitted) == 1)
                assert {*rig.admitted, *second.admitted} == {job.id for job in bad}


async def test_a_suspect_that_ends_without_a_token_makes_room_for_the_others(
    redis_url: str, queue: str, impatient: None
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        bad = await suspect(client, other)
        async with working(redis_url, queue) as rig:
            await until(lambda: bad.id in rig.admitted)
            good = await client.submit("good")
            rig.end(bad)
            await until(lambda: good.id in rig.admitted)


async def test_what_a_stopping_worker_had_just_started_is_handed_back_and_blames_nobody(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        jobs = [await client.submit("hello") for _ in range(5)]
        async with working(redis_url, queue) as rig:
            await until(lambda: rig.outbox.n_jobs > 0 or rig.admitted)
        for job in jobs:
            status = await job.status()
            assert (status.state, status.crashes) == ("queued", 0)
        async with working(redis_url, queue, "w2") as second:
            await until(lambda: len(second.admitted) == 5)
        assert {(await job.status()).crashes for job in jobs} == {0}
        assert await other.redis.xlen(client.keys.dead(queue, 0)) == 0
