"""From the worker to Redis: what jobs generated, how they ended, and the renewal of their leases.

The engine thread puts outputs in; everything else happens on the I/O thread. While one flush is under way the
next ticks gather, so a slow Redis makes larger events and never a slower engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, TypeVar

from redis.exceptions import RedisError

from llamaq.common import codec
from llamaq.common.errors import JobRejected
from llamaq.common.messages import Failed, Finished, JobStats
from llamaq.common.scripts import Claim, Ending, Flushed, Increment, Scripts
from llamaq.worker.jobs import Job, JobEnded, Lease, NewToken, Output

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.1
"""How often Redis is asked about jobs without news (in prefill, say): whether to cancel, whether still ours."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0


class Controls(Protocol):
    """What the outbox learns from Redis and passes on to the engine thread; every call is thread-safe."""

    def cancel(self, job_id: str) -> None:
        """Somebody wants the job to end."""

    def release(self, job_id: str, attempt: int) -> None:
        """This attempt is no longer ours: drop it without an end."""


@dataclass(slots=True, eq=False)
class Account:
    """What a job generated, and how much of it Redis has."""

    lease: Lease
    streams: bool
    """Whether its tokens are published while it runs."""
    wants_reader: bool
    """Whether it is cancelled when nobody listens."""
    stored: int
    """Tokens that Redis has."""
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The text that each token released."""
    text_ends: list[int] = field(default_factory=list)
    """After each token the characters that were released so far."""
    ending: Ending | None = None
    stats: JobStats | None = None
    tail: str = ""
    """The text that only the end released."""
    heard_s: float = field(default_factory=time.monotonic)
    """When somebody was last seen listening."""
    is_cancelling: bool = False
    is_leaving: bool = False
    """It is to be handed back."""

    def add(self, token: int, text: str) -> None:
        """The job generated a token, which released this text."""
        self.tokens.append(token)
        self.texts.append(text)
        self.text_ends.append((self.text_ends[-1] if self.text_ends else 0) + len(text))

    def increment(self) -> Increment:
        """What Redis does not have yet."""
        lease, since = self.lease, self.stored
        tokens = self.tokens[since:] if self.streams or self.ending else []
        payload = b""
        if self.streams and (tokens or self.tail):
            text_offset = self.text_ends[since - 1] if since else 0
            payload = codec.encode_tokens(since, tokens, text_offset, "".join(self.texts[since:]) + self.tail)
        return Increment(lease.job_id, lease.attempt, lease.stream, lease.entry_id, since, len(tokens), payload)

    def close(self, ended: JobEnded) -> None:
        """Take the end of the job in; it is written with the next flush."""
        self.tail, self.stats = ended.text, ended.stats
        if ended.error is not None:
            self.ending = failure(ended.error)
        elif ended.reason is not None:
            event = Finished(finish_reason=ended.reason, stats=ended.stats)
            output = codec.encode_output("".join(self.texts) + self.tail, self.tokens)
            fields = {"finish_reason": ended.reason.value, "stats": codec.encode_model(ended.stats), "output": output}
            self.ending = Ending(event, fields)
        else:
            raise ValueError(f"job {self.lease.job_id} ended without a reason")


def failure(error: JobRejected) -> Ending:
    """The end of a job that failed."""
    event = Failed(code=error.code.value, message=error.message)
    return Ending(event, {"error": codec.encode_event(event)})


class Outbox:
    """One worker's writing end of a queue."""

    def __init__(
        self,
        scripts: Scripts,
        worker_id: str,
        controls: Controls,
        *,
        lease_s: float,
        disconnect_s: float,
        is_alive: Callable[[], bool],
        on_finished: Callable[[JobStats], Awaitable[None]],
    ) -> None:
        """Leases are renewed only while `is_alive` says that the engine ticks."""
        self._scripts = scripts
        self._worker_id = worker_id
        self._controls = controls
        self._renew_every_s = lease_s / 3
        self._renewed_s = 0.0
        self._disconnect_s = disconnect_s
        self._is_alive = is_alive
        self._on_finished = on_finished
        self._accounts: dict[str, Account] = {}
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self.freed = asyncio.Event()
        """Set when a job has left the engine, or never gets there, so that there is room for another."""

    @property
    def n_running(self) -> int:
        """Jobs that are with the engine."""
        return sum(account.ending is None for account in self._accounts.values())

    @property
    def n_open(self) -> int:
        """Jobs that this worker still answers for."""
        return len(self._accounts)

    def hold(self, lease: Lease, stored: int) -> None:
        """Answer for a job whose attempt has begun and that is being prepared; Redis has `stored` tokens of it."""
        self._accounts[lease.job_id] = Account(lease, streams=False, wants_reader=False, stored=stored)
        self._news.set()  # it is asked about from now on, and its lease renewed, however long its first token takes

    def open(self, job: Job, texts: Sequence[str]) -> bool:
        """The job is ready for the engine; `texts` is what each of its resumed tokens released.

        False when it was lost while it was prepared.
        """
        if not self._holds(job.lease):
            return False
        request = job.request
        account = Account(job.lease, request.stream, request.cancel_on_disconnect, stored=len(job.resumed))
        for token, text in zip(job.resumed, texts, strict=True):
            account.add(token, text)
        self._accounts[job.id] = account
        return True

    def reject(self, lease: Lease, error: JobRejected) -> None:
        """End a job that could not be prepared."""
        if self._holds(lease):
            self._accounts[lease.job_id].ending = failure(error)
            self._news.set()
            self.freed.set()

    def _holds(self, lease: Lease) -> bool:
        account = self._accounts.get(lease.job_id)
        return account is not None and account.lease == lease

    def put(self, outputs: list[Output]) -> None:
        """Hand over what a tick brought. Called on the engine thread; never waits."""
        if outputs:
            self._call_soon(self._take, outputs)

    def give_up(self, jobs: list[Job]) -> None:
        """Hand jobs back that the engine will not run. Called on the engine thread; never waits."""
        if jobs:
            self._call_soon(self._mark_leaving, {job.id for job in jobs})

    def _call_soon(self, call: Callable[[T], None], argument: T) -> None:
        with suppress(RuntimeError):  # the I/O loop is closed: the process is on its way out
            self._loop.call_soon_threadsafe(call, argument)

    def _mark_leaving(self, job_ids: AbstractSet[str]) -> None:
        for job_id in job_ids & self._accounts.keys():
            self._accounts[job_id].is_leaving = True
        self._news.set()

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            account = self._accounts.get(output.job.id)
            if account is None or account.lease != output.job.lease:
                continue  # lost meanwhile: it is no longer ours to write
            if isinstance(output, NewToken):
                account.add(output.token, output.text)
            else:
                account.close(output)
                self.freed.set()
        self._news.set()

    async def run(self) -> None:
        """Flush whenever there are news, and at least every `POLL_S` while there are jobs; until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if self._accounts else None):
                    await self._news.wait()
            self._news.clear()
            try:
                await self.flush()
                backoff_s = FIRST_BACKOFF_S
            except RedisError as exc:
                log.warning("outbox.redis_error error=%r retry_s=%.2f", exc, backoff_s)
                self._news.set()
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def flush(self) -> None:
        """Write what Redis does not have; raises `RedisError`, and may then simply be called again."""
        now = time.monotonic()
        renew = now - self._renewed_s >= self._renew_every_s and self._is_alive()
        accounts = sorted(self._accounts.values(), key=lambda account: account.lease.partition)
        for _, group in groupby(accounts, key=lambda account: account.lease.partition):
            partition = list(group)
            running = [account for account in partition if account.ending is None]
            if running:
                await self._flush_running(running, renew)
            await asyncio.gather(*(self._finish(account, account.ending) for account in partition if account.ending))
            await asyncio.gather(*(self._hand_back(account) for account in running if account.is_leaving))
        if renew:
            self._renewed_s = now

    async def _flush_running(self, accounts: list[Account], renew: bool) -> None:
        increments = [account.increment() for account in accounts]
        replies = await self._scripts.flush(self._worker_id, increments, renew=renew)
        for account, increment, reply in zip(accounts, increments, replies, strict=True):
            self._heed(account, increment, reply)

    def _heed(self, account: Account, sent: Increment, reply: Flushed) -> None:
        """Draw the consequences of what Redis answered for one job."""
        if reply.code == "lost":
            self._lose(account)
            return
        now = time.monotonic()
        if reply.listeners:
            account.heard_s = now
        is_alone = account.wants_reader and now - account.heard_s > self._disconnect_s
        if (reply.code == "cancel" or is_alone) and not account.is_cancelling:
            account.is_cancelling = True
            self._controls.cancel(account.lease.job_id)
        if account.streams:
            account.stored = reply.stored
            if reply.stored != sent.offset + sent.count:
                self._news.set()  # Redis has another length than we thought: send the rest again

    async def _finish(self, account: Account, ending: Ending) -> None:
        outcome = await self._scripts.finish(account.increment(), ending)
        if outcome == "ok":
            log.info("job.%s id=%s", ending.status, account.lease.job_id)
            self._forget(account)
            if account.stats is not None:
                await self._on_finished(account.stats)
        elif outcome == "lost" or outcome > max(len(account.tokens), account.stored):
            self._lose(account)
        else:
            account.stored = outcome
            self._news.set()

    async def close(self) -> None:
        """Write what there is, and hand the other jobs back; raises `RedisError`."""
        await self.flush()
        self._mark_leaving(self._accounts.keys())
        await self.flush()

    async def _hand_back(self, account: Account) -> None:
        """Give a started job up, so that the next worker that looks takes it at once."""
        lease = account.lease
        accepted = await self._scripts.requeue(Claim(lease.job_id, lease.stream, lease.entry_id), lease.attempt)
        log.info("job.handed_back id=%s accepted=%s", lease.job_id, accepted)
        self._forget(account)

    def _lose(self, account: Account) -> None:
        log.warning("job.lost id=%s attempt=%d", account.lease.job_id, account.lease.attempt)
        self._forget(account)
        self._controls.release(account.lease.job_id, account.lease.attempt)
        self.freed.set()

    def _forget(self, account: Account) -> None:
        """Take it off the books, unless a newer attempt of the same job stands there already."""
        if self._accounts.get(account.lease.job_id) is account:
            del self._accounts[account.lease.job_id]
