"""An outbox on a real Redis, with a client, a fake worker that claims its jobs, and a recorded engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Tokens
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.script_types import Attempt
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.broker.outbox_settings import Checkpoints, OutboxSettings, RetryDelay
from llamaq.worker.broker.worker_scripts import WorkerScripts
from llamaq.worker.core.job import Job, Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.core.outputs import JobEnded, NewToken, SlotAcquired
from llamaq.worker.engine_loop.output_mailbox import OutputMailbox
from llamaq.worker.engine_loop.telemetry import EndedJob

NEVER = Checkpoints(tokens=10**6, every_s=10**6)
AT_ONCE = Checkpoints(tokens=10**6, every_s=0.0)


@dataclass
class RecordingEngine:
    """Records the calls of the outbox to the engine thread, and the stats of finished jobs."""

    cancelled: list[str] = field(default_factory=list)
    released: list[Lease] = field(default_factory=list)
    finished: list[EndedJob] = field(default_factory=list)

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    def release(self, lease: Lease) -> None:
        self.released.append(lease)

    def record(self, ended: EndedJob) -> None:
        self.finished.append(ended)


@dataclass
class OutboxRig:
    """An outbox with its mailbox, a client, and a fake worker that claims jobs for the outbox."""

    client: AsyncClient
    claimer: FakeWorker
    outbox: Outbox
    outputs: OutputMailbox
    engine: RecordingEngine
    streams: bool
    attempts: dict[str, Attempt] = field(default_factory=dict)
    """The claimed attempt of each job."""

    async def claim(
        self,
        metadata: dict[str, Any] | None = None,
        queue_timeout_s: float | None = None,
        *,
        cancel_on_disconnect: bool = False,
    ) -> tuple[AsyncJob, Lease, JobRequest]:
        """Submit a job, and register it at the outbox as claimed."""
        job = await self.client.submit(
            "hello",
            stream=self.streams,
            metadata=metadata or {},
            queue_timeout_s=queue_timeout_s,
            cancel_on_disconnect=cancel_on_disconnect,
        )
        claim = await self.claimer.claim()
        assert claim is not None
        attempt = await self.claimer.claim_scripts.claim_job(claim, self.claimer.name, LEASE_MS)
        assert isinstance(attempt, Attempt)
        self.attempts[job.id] = attempt
        lease = Lease(job.id, 0, claim.stream, claim.entry_id, attempt.number)
        self.outbox.register(lease, attempt, JobTimes(submitted_s=time.monotonic()))
        return job, lease, codec.decode_request(attempt.request, codec.MAX_EVENT_BYTES)

    async def begin(self) -> tuple[AsyncJob, Job]:
        """Submit a job, and start it on the fake worker."""
        job, lease, request = await self.claim()
        unused = cast(Any, None)
        running = Job(lease, request, [1], sampler=unused, detokenizer=unused)
        assert self.outbox.set_prepared(PreparedJob(running, []))
        self.outputs.put([SlotAcquired(running)])
        await asyncio.sleep(0)
        await self.outbox.flush()
        return job, running

    async def put(self, job: Job, *tokens: int) -> None:
        """Put generated tokens into the mailbox. The text of each token is one letter."""
        self.outputs.put([NewToken(job, token, chr(ord("a") + token % 26), 0.0) for token in tokens])
        await asyncio.sleep(0)

    async def end(self, job: Job, n_tokens: int) -> None:
        stats = JobStats(generated_tokens=n_tokens)
        self.outputs.put([JobEnded(job, stats, reason=FinishReason.LENGTH)])
        await asyncio.sleep(0)

    async def events(self, job: AsyncJob) -> list[Any]:
        return (await self._read(job))[0]

    async def stored(self, job: AsyncJob) -> list[int]:
        """Return the stored tokens. Offsets have no gap and no repeat, and the count equals the one in the hash."""
        events, generated = await self._read(job)
        tokens: list[int] = []
        for event in events:
            if isinstance(event, Tokens):
                assert event.offset == len(tokens) == event.text_offset
                tokens += event.tokens
                assert len(event.text) == len(event.tokens)
        assert generated == len(tokens)
        return tokens

    async def _read(self, job: AsyncJob) -> tuple[list[Any], int]:
        """Return the events and the hash field `generated`, read in one step."""
        keys = self.client.keys.of_job(job.id)
        script = "return {redis.call('XRANGE', KEYS[1], '-', '+'), redis.call('HGET', KEYS[2], 'generated')}"
        entries, generated = await cast(Any, self.client.redis.eval(script, 2, keys.events, keys.job))
        return [codec.decode_event(fields[1]) for _, fields in entries], int(generated)


@asynccontextmanager
async def working(
    url: str, queue: str, *, checkpoints: Checkpoints = NEVER, streams: bool = True, lease_s: float = 1000.0
) -> AsyncIterator[OutboxRig]:
    async with AsyncClient(url, queue) as client, FakeWorker(url, queue) as worker:
        engine, outputs = RecordingEngine(), OutputMailbox()
        outbox = Outbox(
            WorkerScripts(worker.redis, worker.keys, worker.name),
            engine,
            outputs,
            OutboxSettings(lease_s, 1000.0, checkpoints, RetryDelay(0.01, 0.02)),
            is_alive=lambda: True,
            on_finished=engine.record,
        )
        yield OutboxRig(client, worker, outbox, outputs, engine, streams)


async def until(read: Callable[[AsyncJob], Awaitable[list[int]]], job: AsyncJob, wanted: list[int]) -> None:
    """Wait until `read` returns `wanted`."""
    async with asyncio.timeout(10):
        while await read(job) != wanted:  # noqa: ASYNC110  # Redis changes without an event
            await asyncio.sleep(0.01)
