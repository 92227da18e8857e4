"""Suspects run alone. The tests use the intake and outbox of a worker on a real Redis, and generate the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.job_claims import claims_of
from tests.support.reclaims import reclaim
from tests.support.worker_scripts import worker_scripts

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.keys import GROUP
from llamaq.common.protocol.script_types import Attempt, Claimant
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker import intake as intake_module
from llamaq.worker.broker import suspects as suspects_module
from llamaq.worker.broker.intake import Intake
from llamaq.worker.broker.job_claims import ClaimReply, JobClaims
from llamaq.worker.broker.job_starts import JobStarts
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.broker.outbox_settings import Checkpoints, OutboxSettings, RetryDelay
from llamaq.worker.broker.worker_scripts import WorkerScripts
from llamaq.worker.core.job import Job, Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.core.outputs import JobEnded, NewToken, SlotAcquired
from llamaq.worker.engine_loop.output_mailbox import OutputMailbox
from llamaq.worker.engine_loop.telemetry import EndedJob
from llamaq.worker.scheduling.bulk_share import BulkShare
from llamaq.worker.testing import make_job

LEASE_S = 1.0
FOREVER = 10**15


class BytePreparer:
    """Prepares jobs without a model, on the threads of the executor."""

    def is_quick(self, payload: bytes) -> bool:
        return False

    def may_have_grammar(self, payload: bytes) -> bool:
        return False

    def prepare(self, payload: bytes, lease: Lease, published: TokenSpan, times: JobTimes) -> PreparedJob:
        request = codec.decode_request(payload, codec.MAX_EVENT_BYTES)
        job = make_job(request.prompt or "", job_id=lease.job_id, resumed=published.tokens)
        job.lease, job.request = lease, request
        return PreparedJob(job, ["" for _ in published.tokens])


@dataclass
class FakeEngineWorker:
    """A worker without an engine: the test generates tokens and ends jobs."""

    name: str
    outbox: Outbox
    outputs: OutputMailbox
    admitted: dict[str, Job] = field(default_factory=dict)
    """Jobs that were passed to the engine, by id."""
    history: list[str] = field(default_factory=list)
    """Ids of the jobs, in the order in which they were passed to the engine."""
    n_slots: int = 8
    """The jobs that were passed to the engine first have slots, at most this number of jobs."""
    intake: asyncio.Task[None] | None = None
    """Runs the intake."""

    async def stop_intake(self) -> None:
        """Stop claiming jobs, as a worker that drains does."""
        assert self.intake is not None
        await cancel_tasks(self.intake)

    def generate(self, job: AsyncJob, token: int = 65) -> None:
        self.outputs.put([NewToken(self.admitted[job.id], token, "A", 0.0)])

    def end(self, job: AsyncJob) -> None:
        self.outputs.put([JobEnded(self.admitted.pop(job.id), JobStats(), FinishReason.STOP)])

    def admit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.admitted[job.id] = job
            self.history.append(job.id)
            if len(self.admitted) <= self.n_slots:
                self.outputs.put([SlotAcquired(job)])

    def cancel(self, job_id: str) -> None:
        """Ignore the cancellation."""

    def release(self, lease: Lease) -> None:
        if lease.job_id in self.admitted and self.admitted[lease.job_id].lease is lease:
            del self.admitted[lease.job_id]


@asynccontextmanager
async def working(
    redis_url: str, queue: str, name: str = "w1", capacity: int = 8, n_slots: int = 0, n_threads: int = 1
) -> AsyncIterator[FakeEngineWorker]:
    """Run the intake and the outbox of a worker until the end of the block."""
    async with FakeWorker(redis_url, queue, name=name) as connection:
        await connection.announce()
        worker = FakeEngineWorker(name, outbox=None, outputs=OutputMailbox(), n_slots=n_slots or capacity)  # type: ignore[arg-type]  # set below, because intake and outbox refer to each other
        job_claims = claims_of(connection, Claimant(name, int(LEASE_S * 1000)), max_crashes=2)
        worker.outbox = outbox = Outbox(
            WorkerScripts(connection.redis, connection.keys, name),
            worker,
            worker.outputs,
            OutboxSettings(LEASE_S, 60.0, Checkpoints(1, 1.0), RetryDelay(0.01, 0.02)),
            is_alive=lambda: True,
            on_finished=_ignore,
        )
        await job_claims.open()
        with ThreadPoolExecutor(n_threads) as executor:
            starts = JobStarts(
                job_claims, outbox, BytePreparer(), executor, worker.admit, n_slots or capacity,  # type: ignore[arg-type]
            )  # fmt: skip
            intake = Intake(
                job_claims, outbox, starts, capacity=capacity, bulk_share=BulkShare(0.1, 1), is_alive=lambda: True,
            )  # fmt: skip
            worker.intake = asyncio.create_task(intake.run())
            tasks = [worker.intake, asyncio.create_task(outbox.run())]
            try:
                yield worker
            finally:
                await cancel_tasks(*tasks)
                await intake.close()
                await outbox.close()
                await job_claims.close()


def _ignore(_: EndedJob) -> None:
    """Ignore the end of a job."""


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # Redis and a thread change it
        await asyncio.sleep(0.01)


async def until_true(condition: Callable[[], Awaitable[object]]) -> None:
    while not await condition():  # noqa: ASYNC110  # Redis changes it
        await asyncio.sleep(0.01)


async def submit_suspect(client: AsyncClient, other: FakeWorker, **options: Any) -> AsyncJob:
    """Submit a job that has crashed one worker, and requeue it."""
    job = await client.submit("suspect", **options)
    claim = await other.claim()
    assert claim is not None
    assert isinstance(await other.claim_scripts.claim_job(claim, "dead", LEASE_MS), Attempt)
    code = await worker_scripts(other, "heir").check_crash(
        claim, last_worker="dead", silent_ms=FOREVER, dead_after_s=1, max_crashes=2
    )
    assert code == "suspect"
    assert await worker_scripts(other).requeue(claim, None)
    return job


async def submit_suspect_to_busy_worker(client: AsyncClient, other: FakeWorker, worker: FakeEngineWorker) -> AsyncJob:
    """Submit a suspect while a worker runs one job. The worker has room for two jobs, so it claims the suspect."""
    second = await client.submit("second")
    await until(lambda: second.id in worker.admitted)
    suspect = await submit_suspect(client, other)
    worker.end(second)
    return suspect


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time for which a suspect waits for running jobs, and the time between two reclaims."""
    monkeypatch.setattr(suspects_module, "MAX_SUSPECT_WAIT_S", 0.2)
    monkeypatch.setattr(intake_module, "SEARCH_EVERY_S", 0.1)


async def test_no_other_job_is_started_until_a_suspect_has_stored_a_token(
    redis_url: str, queue: str, short_waits: None
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        suspect = await submit_suspect(client, other)
        async with working(redis_url, queue) as worker:
            await until(lambda: suspect.id in worker.admitted)
            good = await client.submit("good")
            await asyncio.sleep(0.5)  # enough for several reads of the queue
            assert list(worker.admitted) == [suspect.id]
            assert (await client.queue_depth()).waiting == 1
            worker.generate(suspect)
            await until(lambda: good.id in worker.admitted)
            assert worker.history == [suspect.id, good.id]


async def test_running_jobs_are_requeued_when_a_suspect_has_waited_for_them(
    redis_url: str, queue: str, short_waits: None
) -> None:
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as other,
        working(redis_url, queue, capacity=2) as worker,
    ):
        good = await client.submit("good")
        await until(lambda: good.id in worker.admitted)
        worker.generate(good)
        await until(lambda: worker.outbox.n_stored_tokens(good.id) == 1)
        suspect = await submit_suspect_to_busy_worker(client, other, worker)
        await until(lambda: suspect.id in worker.admitted)
        assert list(worker.admitted) == [suspect.id]
        worker.generate(suspect)
        await until(lambda: good.id in worker.admitted)
        assert worker.history[-2:] == [suspect.id, good.id]
        assert worker.admitted[good.id].generated_before == [65], "the requeued job resumes after its stored tokens"
        assert (await good.status()).crashes == 0


async def test_the_lease_of_a_waiting_suspect_is_renewed(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects_module, "MAX_SUSPECT_WAIT_S", 60.0)
    monkeypatch.setattr(intake_module, "SEARCH_EVERY_S", 0.1)
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as other,
        working(redis_url, queue, capacity=2) as worker,
    ):
        good = await client.submit("good")
        await until(lambda: good.id in worker.admitted)
        suspect = await submit_suspect_to_busy_worker(client, other, worker)
        keys = client.keys.of_job(suspect.id)

        async def is_claimed() -> bool:
            return (await suspect.status()).worker == worker.name

        await until_true(is_claimed)
        entry: Any = await client.redis.hget(keys.job, "entry")
        idle_ms: list[int] = []
        while sum(after < before for before, after in pairwise(idle_ms)) < 5:  # more than a lease passes meanwhile
            await asyncio.sleep(0.01)
            pending: Any = await client.redis.xpending_range(keys.interactive, GROUP, entry, entry, 1)
            idle_ms.append(pending[0]["time_since_delivered"])
        assert await reclaim(other, keys.interactive, 10, LEASE_MS, trusted_until_ms=FOREVER) == []
        worker.end(good)
        await until(lambda: suspect.id in worker.admitted)
        assert worker.history[-1] == suspect.id
        assert worker.history.count(suspect.id) == 1


async def test_suspects_run_one_after_the_other(redis_url: str, queue: str, short_waits: None) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        suspects = [
            await submit_suspect(client, other, priority=priority)
            for priority in ("interactive", "bulk", "interactive")
        ]
        async with working(redis_url, queue) as worker:
            proven: set[str] = set()
            while len(proven) < 3:
                await until(lambda: any(job.id in worker.admitted and job.id not in proven for job in suspects))
                unproven = [job for job in suspects if job.id in worker.admitted and job.id not in proven]
                assert len(unproven) == 1
                assert list(worker.admitted) == [unproven[0].id]
                worker.generate(unproven[0])
                proven.add(unproven[0].id)
            await until(lambda: len(worker.admitted) == 3)
            for job in suspects:
                worker.end(job)
            for job in suspects:
                assert (await job.result(timeout=10)).tokens == (65,)


async def test_a_second_suspect_runs_on_an_idle_worker(redis_url: str, queue: str, short_waits: None) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        suspects = [await submit_suspect(client, other) for _ in range(2)]
        async with working(redis_url, queue) as worker:
            await until(lambda: len(worker.admitted) == 1)
            async with working(redis_url, queue, "w2") as second:
                await until(lambda: len(second.admitted) == 1)
                assert {*worker.admitted, *second.admitted} == {job.id for job in suspects}


async def test_a_suspect_whose_claim_failed_is_requeued(
    redis_url: str, queue: str, short_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [RedisConnectionError("no answer")]
    claim = JobClaims.claim_jobs

    async def fail_once(claims: JobClaims, wanted: Any, *, at_risk: bool = True) -> list[ClaimReply]:
        if at_risk and failures:
            raise failures.pop()
        return await claim(claims, wanted, at_risk=at_risk)

    monkeypatch.setattr(JobClaims, "claim_jobs", fail_once)
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        suspect = await submit_suspect(client, other)
        async with working(redis_url, queue) as worker:
            await until(lambda: suspect.id in worker.admitted)
            assert not failures
            worker.end(suspect)
            await suspect.result(timeout=10)


async def test_other_jobs_are_started_after_a_suspect_has_ended_without_a_token(
    redis_url: str, queue: str, short_waits: None
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        suspect = await submit_suspect(client, other)
        async with working(redis_url, queue) as worker:
            await until(lambda: suspect.id in worker.admitted)
            good = await client.submit("good")
            worker.end(suspect)
            await until(lambda: good.id in worker.admitted)


async def test_a_stopping_worker_requeues_jobs_that_it_has_just_started_and_counts_no_crash(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as other:
        jobs = [await client.submit("hello") for _ in range(5)]
        async with working(redis_url, queue) as worker:
            await until(lambda: worker.outbox.n_jobs > 0 or worker.admitted)
        for job in jobs:
            status = await job.status()
            assert (status.state, status.crashes) == ("queued", 0)
        async with working(redis_url, queue, "w2") as second:
            await until(lambda: len(second.admitted) == 5)
        assert {(await job.status()).crashes for job in jobs} == {0}
        assert await other.redis.xlen(client.keys.dead(queue, 0)) == 0
