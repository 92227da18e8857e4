"""From the worker to Redis: what jobs generated, how they ended, and the renewal of their leases.

The engine thread puts outputs in; everything else happens on the I/O thread. While one flush is under way the
next ticks gather, so a slow Redis makes larger events and never a slower engine. A Redis that is away, or full, takes
nothing for a while: everything is kept here and written when it does again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import groupby
from typing import Protocol, TypeVar

from redis.exceptions import RedisError, ResponseError

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.scripts import Claim, Flushed, Increment, Scripts, TerminalWrite
from llamaq.common.redis.outage_log import OutageLog
from llamaq.common.redis.redis_errors import is_fault_of_a_job
from llamaq.worker.broker.job_progress import Checkpoints, JobProgress, failure
from llamaq.worker.core.job import Job, Lease, NewToken, Output

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.1
"""How often Redis is asked about jobs without news (in prefill, say): whether to cancel, whether still ours."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0
OUTAGE_S = 1.0
"""A flush that took longer than this was held up by a Redis that was away."""


class Controls(Protocol):
    """What the outbox learns from Redis and passes on to the engine thread; every call is thread-safe."""

    def cancel(self, job_id: str) -> None:
        """Somebody wants the job to end."""

    def release(self, job_id: str, attempt: int) -> None:
        """This attempt is no longer ours: drop it without an end."""


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
        checkpoints: Checkpoints,
        is_alive: Callable[[], bool],
        on_finished: Callable[[JobStats], Awaitable[None]],
    ) -> None:
        """Leases are renewed only while `is_alive` says that the engine ticks; `checkpoints` are for stream=false."""
        self._scripts = scripts
        self._worker_id = worker_id
        self._controls = controls
        self._renew_every_s = lease_s / 3
        self._renewed_s = 0.0
        self._disconnect_s = disconnect_s
        self._checkpoints = checkpoints
        self._trouble = OutageLog(log, "outbox")
        self._back_s = 0.0
        """When Redis was last found to be back: readers have to connect again, too, and have all their time for it."""
        self._is_alive = is_alive
        self._on_finished = on_finished
        self._has_crashed = False
        self._accounts: dict[str, JobProgress] = {}
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self.freed = asyncio.Event()
        """Set when a job has left the engine, or never gets there, so that there is room for another."""

    @property
    def n_running(self) -> int:
        """Jobs that are with the engine."""
        return sum(account.ending is None for account in self._accounts.values())

    @property
    def n_urgent(self) -> int:
        """Interactive jobs among those that are with the engine."""
        return sum(account.ending is None and account.lease.is_urgent for account in self._accounts.values())

    @property
    def n_open(self) -> int:
        """Jobs that this worker still answers for."""
        return len(self._accounts)

    def stored_of(self, job_id: str) -> int | None:
        """Tokens that Redis has of a job; None when this worker does not answer for it any more."""
        account = self._accounts.get(job_id)
        return None if account is None else account.stored

    def hold(self, lease: Lease, stored: int) -> None:
        """Answer for a job whose attempt has begun and that is being prepared; Redis has `stored` tokens of it."""
        self._accounts[lease.job_id] = JobProgress(lease, None, wants_reader=False, stored=stored)
        self._news.set()  # it is asked about from now on, and its lease renewed, however long its first token takes

    def open(self, job: Job, texts: Sequence[str]) -> bool:
        """The job is ready for the engine; `texts` is what each of its resumed tokens released.

        False when it was lost while it was prepared.
        """
        if not self._holds(job.lease):
            return False
        request = job.request
        checkpoints = None if request.stream else self._checkpoints
        account = JobProgress(job.lease, checkpoints, request.cancel_on_disconnect, stored=len(job.resumed))
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

    def clear(self) -> None:
        """Hand back every running job; the engine drops them. Called on the I/O thread, as often as one likes."""
        for account in self._accounts.values():
            if account.ending is None and not account.is_leaving:
                account.is_leaving = True
                self._controls.release(account.lease.job_id, account.lease.attempt)
                self._news.set()

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
            started_s = time.monotonic()
            try:
                await self.flush()
            except RedisError as exc:
                self._trouble.note(exc)
                self._news.set()
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S, self._renew_every_s)
            else:
                if self._trouble or time.monotonic() - started_s > OUTAGE_S:
                    self._back_s = time.monotonic()
                self._trouble.is_over()
                backoff_s = FIRST_BACKOFF_S

    async def flush(self) -> None:
        """Write what Redis does not have; raises `RedisError`, and may then simply be called again."""
        now = time.monotonic()
        renew = now - self._renewed_s >= self._renew_every_s and self._is_alive()
        accounts = sorted(self._accounts.values(), key=lambda account: account.lease.partition)
        partitions = groupby(accounts, key=lambda account: account.lease.partition)
        await _all(self._flush_partition(list(group), now, renew=renew) for _, group in partitions)
        if renew:
            self._renewed_s = now

    async def _flush_partition(self, accounts: list[JobProgress], now: float, *, renew: bool) -> None:
        running = [account for account in accounts if account.ending is None]
        if running:
            await self._flush_running(running, now, renew=renew)
        await _all(
            [self._finish(account, account.ending, now) for account in accounts if account.ending]
            + [self._hand_back(account) for account in running if account.may_leave and self._holds(account.lease)]
        )

    async def _flush_running(self, accounts: list[JobProgress], now: float, *, renew: bool) -> None:
        increments = [account.increment(now) for account in accounts]
        replies = await self._scripts.flush(self._worker_id, increments, renew=renew)
        for account, increment, reply in zip(accounts, increments, replies, strict=True):
            self._heed(account, increment, reply, now)
        if refusal := next((reply.refusal for reply in replies if reply.refusal), ""):
            raise ResponseError(refusal)

    def _heed(self, account: JobProgress, sent: Increment, reply: Flushed, now: float) -> None:
        """Draw the consequences of what Redis answered for one job."""
        if reply.code == "lost":
            self._lose(account)
            return
        if reply.listeners:
            account.heard_s = now
        silent_s = now - max(account.heard_s, self._back_s)
        is_alone = account.wants_reader and not self._trouble and silent_s > self._disconnect_s
        if (reply.code == "cancel" or is_alone) and not account.is_cancelling:
            account.is_cancelling = True
            self._controls.cancel(account.lease.job_id)
        if not reply.refusal:
            self._take_stored(account, sent, reply.stored, now)

    def _take_stored(self, account: JobProgress, sent: Increment, stored: int, now: float) -> None:
        """Redis has so many tokens: perhaps others than we thought, and then the rest is sent again."""
        if stored != sent.offset + sent.count:
            log.warning("job.sent_again id=%s had=%d stored=%d", sent.job_id, sent.offset, stored)
            self._news.set()
        account.take_stored(stored, now)

    async def _finish(self, account: JobProgress, ending: TerminalWrite, now: float) -> None:
        last = account.increment(now)
        try:
            outcome = await self._scripts.finish(last, ending)
        except ResponseError as exc:
            if not is_fault_of_a_job(exc):
                raise
            log.error("job.unwritable id=%s error=%s", account.lease.job_id, exc)  # who claims it next buries it
            outcome = "lost"
        if outcome == "ok":
            log.info("job.%s id=%s", ending.status, account.lease.job_id)
            self._forget(account)
            if account.stats is not None:
                await self._on_finished(account.stats)
        elif outcome == "lost" or outcome > max(len(account.tokens), account.stored):
            self._lose(account)
        else:
            self._take_stored(account, last, outcome, now)

    async def close(self, *, crashed: bool = False) -> None:
        """Write what there is, and hand the other jobs back, stored to their last token; raises `RedisError`.

        `crashed`: the engine has, so those that have not stored a token since their start are blamed for it.
        """
        self._has_crashed = crashed
        self._mark_leaving(self._accounts.keys())
        while self._accounts:  # more than once when Redis has lost something and gets it again
            await self.flush()

    async def _hand_back(self, account: JobProgress) -> None:
        """Give a started job up, so that the next worker that looks takes it at once."""
        lease = account.lease
        claim = Claim(lease.job_id, lease.stream, lease.entry_id)
        crashed = self._worker_id if self._has_crashed else ""
        accepted = await self._scripts.requeue(claim, lease.attempt, crashed=crashed)
        log.info("job.handed_back id=%s accepted=%s", lease.job_id, accepted)
        self._forget(account)

    def _lose(self, account: JobProgress) -> None:
        log.warning("job.lost id=%s attempt=%d", account.lease.job_id, account.lease.attempt)
        self._forget(account)
        self._controls.release(account.lease.job_id, account.lease.attempt)
        self.freed.set()

    def _forget(self, account: JobProgress) -> None:
        """Take it off the books, unless a newer attempt of the same job stands there already."""
        if self._accounts.get(account.lease.job_id) is account:
            del self._accounts[account.lease.job_id]


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Wait for all of these, whatever happens to some, and then raise what went wrong first."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
