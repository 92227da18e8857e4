"""A worker without a model, for tests of code that uses llamaq: it plays a worker's part step by step.

    async with FakeWorker(url, queue="tests") as worker:
        job = await client.submit("hello")
        attempt = await worker.start_next()
        await attempt.emit([1, 2], "one two")
        await attempt.finish()

`serve` answers every job of a queue by itself, and `serving` does so in a thread, for blocking code.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from redis.exceptions import ResponseError

from llamaq.common.cancel_tasks import cancel_tasks
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Failed, Finished
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.queue_state import CacheSnapshot, Worker, WorkerCard
from llamaq.common.protocol.scripts import Attempt, Claim, Flushed, Increment, Scripts, TerminalWrite
from llamaq.common.redis.connect import connect

Answer = Callable[[JobRequest], Sequence[str]]
"""From a request to the pieces of its answer, each of which becomes one token."""

POLL_MS = 10


class FakeWorker:
    """Claims jobs of partition 0 of a queue. Bound to the event loop it is used in."""

    def __init__(self, url: str, queue: str, *, key_prefix: str = "llamaq", name: str = "fake") -> None:
        self.name = name
        self.queue = queue
        self.keys = Keys(key_prefix)
        self.redis = connect(url, name="llamaq-fake-worker")
        self.scripts = Scripts(self.redis, self.keys)
        self._streams = [self.keys.jobs(queue, 0, priority) for priority in Priority]

    async def __aenter__(self) -> Self:
        for stream in self._streams:
            try:
                await self.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
            except ResponseError as exc:
                if "BUSYGROUP" not in str(exc):
                    raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.redis.aclose()

    async def announce(
        self,
        *,
        vocab_hash: str = "0" * 64,
        now_ms: int = 1,
        ttl_s: int = 60,
        host: str = "localhost",
        tick_age_ms: int = 0,
    ) -> WorkerCard:
        """Send one heartbeat, so that the worker is listed."""
        card = WorkerCard(
            worker=self.name,
            queue=self.queue,
            model="fake",
            n_ctx=512,
            n_ctx_train=512,
            n_vocab=256,
            n_parallel=4,
            quantization="F32",
            chat_template=None,
            vocab_hash=vocab_hash,
            host=host,
            pid=1,
            device="none",
            version="0",
            started_ms=now_ms,
        )
        cache = CacheSnapshot(n_cells=512, reserved_cells=0)
        worker = Worker(card=card, cache=cache, heartbeat_ms=now_ms, tick_age_ms=tick_age_ms)
        await self.redis.hset(self.keys.worker(self.name), "worker", codec.encode_model(worker))
        await self.redis.expire(self.keys.worker(self.name), ttl_s)
        await self.redis.zadd(self.keys.workers(self.queue), {self.name: now_ms})
        return card

    async def claim(self) -> Claim | None:
        """Take the next entry off the queue, interactive jobs first; None when nothing waits."""
        for stream in self._streams:
            found: Any = await self.redis.xreadgroup(GROUP, self.name, {stream: ">"}, count=1)
            for _, entries in found:
                for entry_id, fields in entries:
                    return Claim(fields[b"id"].decode(), stream, entry_id.decode())
        return None

    async def start_next(self) -> FakeAttempt:
        """Wait for a job that can be started, and start it."""
        while True:
            claim = await self.claim()
            started = await self.scripts.start(claim, self.name) if claim else None
            if claim and isinstance(started, Attempt):
                return FakeAttempt(self, claim, started)
            await asyncio.sleep(POLL_MS / 1000 if claim is None else 0)

    async def serve(self, answer: Answer) -> None:
        """Answer job after job, until cancelled."""
        await self.announce()
        while True:
            attempt = await self.start_next()
            await attempt.answer(answer(attempt.request))


class FakeAttempt:
    """One job being run by a `FakeWorker`."""

    def __init__(self, worker: FakeWorker, claim: Claim, started: Attempt) -> None:
        self.worker = worker
        self.claim = claim
        self.number = started.number
        self.request = codec.decode_request(started.request, codec.MAX_EVENT_BYTES)
        self.stored = started.generated
        self.tokens: list[int] = []
        self.text = ""

    def increment(self, tokens: Sequence[int] = (), text: str = "", *, offset: int | None = None) -> Increment:
        """What a worker would send for these tokens, at the end of what was stored so far or at `offset`."""
        start = self.stored if offset is None else offset
        payload = codec.encode_tokens(start, list(tokens), len(self.text), text) if tokens or text else b""
        return Increment(
            self.claim.job_id, self.number, self.claim.stream, self.claim.entry_id, start, len(tokens), payload
        )

    async def emit(self, tokens: Sequence[int], text: str) -> Flushed:
        """Generate these tokens and the text that they complete."""
        reply = (await self.worker.scripts.flush(self.worker.name, [self.increment(tokens, text)], renew=False))[0]
        if reply.code != "lost":
            self.stored = reply.stored
            self.tokens += tokens
            self.text += text
        return reply

    async def finish(
        self, reason: FinishReason = FinishReason.STOP, *, tokens: Sequence[int] = (), text: str = ""
    ) -> str | int:
        """End the job; `tokens` and `text` are its last ones."""
        last = self.increment(tokens, text)
        self.tokens += tokens
        self.text += text
        if not self.request.stream:  # no event: the output alone
            last = replace(last, count=len(self.tokens), payload=b"")
        stats = JobStats(
            generated_tokens=len(self.tokens),
            worker=self.worker.name,
            mode="stream" if self.request.stream else "result",
        )
        fields: dict[str, bytes | str] = {
            "finish_reason": reason.value,
            "stats": codec.encode_model(stats),
            "output": codec.encode_output(self.text, self.tokens),
        }
        outcome = await self.worker.scripts.finish(
            last, TerminalWrite(Finished(finish_reason=reason, stats=stats), fields)
        )
        stream = self.worker.keys.stats(self.worker.queue)
        await self.worker.redis.xadd(stream, {"stats": codec.encode_model(stats)}, maxlen=1000)
        return outcome

    async def fail(self, code: str = "internal", message: str = "broken on purpose") -> str | int:
        """End the job with an error."""
        event = Failed(code=code, message=message)
        return await self.worker.scripts.finish(
            self.increment(), TerminalWrite(event, {"error": codec.encode_event(event)})
        )

    async def answer(self, pieces: Sequence[str]) -> None:
        """Generate one token for each piece, 0, 1, 2, …, and finish; stops early when the job was cancelled."""
        for number, piece in enumerate(pieces):
            if self.request.stream:
                reply = await self.emit([number], piece)
                if reply.code != "ok":
                    await self.finish(FinishReason.CANCELLED)
                    return
            else:
                self.tokens.append(number)
                self.text += piece
        await self.finish()


@contextmanager
def serving(url: str, queue: str, answer: Answer, *, key_prefix: str = "llamaq") -> Iterator[None]:
    """Answer the jobs of a queue in a thread meanwhile. Returns when the worker is listed."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stopping = asyncio.Event()

    async def serve() -> None:
        async with FakeWorker(url, queue, key_prefix=key_prefix) as worker:
            await worker.announce()
            task = asyncio.create_task(worker.serve(answer))
            ready.set()
            await stopping.wait()
            await cancel_tasks(task)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="llamaq-fake-worker", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
