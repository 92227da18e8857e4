"""Builds the services on the Redis side of a worker, and wires them to each other and to the tick loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from redis.asyncio import Redis

from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_and_worker_state import WorkerCard
from llamaq.common.protocol.queue_config import QueueConfig
from llamaq.common.protocol.script_types import Claimant
from llamaq.worker.broker.abandoned_jobs import AbandonedJobs
from llamaq.worker.broker.command_inbox import TEXT_COMMANDS, CommandHandler, CommandInbox
from llamaq.worker.broker.deadline_sweep import DeadlineSweep
from llamaq.worker.broker.empty_queue_watch import EmptyQueueWatch
from llamaq.worker.broker.heartbeat import Heartbeat
from llamaq.worker.broker.intake import Intake
from llamaq.worker.broker.job_claims import JobClaims
from llamaq.worker.broker.job_starts import JobStarts
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.broker.outbox_settings import Checkpoints, OutboxSettings, RetryDelay
from llamaq.worker.broker.preparations import Preparer
from llamaq.worker.broker.queue_membership import QueueMembership
from llamaq.worker.broker.stats_writer import StatsWriter
from llamaq.worker.broker.worker_queue import WorkerQueue
from llamaq.worker.broker.worker_scripts import WorkerScripts
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.scheduling.bulk_share import BulkShare
from llamaq.worker.settings import WorkerSettings


class Service(Protocol):
    """A part of the Redis side that runs until it is cancelled."""

    async def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class QueueAccess:
    """What a worker uses to join its queue, and then to claim jobs and to end them."""

    queue: WorkerQueue
    membership: QueueMembership
    job_claims: JobClaims
    stats: StatsWriter


@dataclass(frozen=True, slots=True)
class BrokerServices:
    """The Redis side of a worker that has joined its queue."""

    job_claims: JobClaims
    intake: Intake
    outbox: Outbox
    heartbeat: Heartbeat
    stats: StatsWriter
    membership: QueueMembership
    others: Sequence[Service]
    """The services that need no special handling at the end of the worker."""

    @property
    def after_intake(self) -> Sequence[Service]:
        """The services that run until the worker is closed. The intake ends before them."""
        return (self.outbox, self.heartbeat, self.stats, self.membership, *self.others)


class BrokerFactory:
    """Builds the Redis side of one worker.

    Args:
        settings: The queue, the Redis server, and the time limits.
        card: The id and the description of this worker.
        vocab_blob: The vocabulary of the model, which the heartbeat publishes.
        preparer: Turns the requests of jobs into jobs that the engine can run.
        ticks: The tick loop of the engine thread.
        shared: The objects that the I/O thread shares with the engine thread.
        slot_commands: Executes the commands of operators about slots.
        text_commands: Tokenizes texts and renders chats for clients.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        card: WorkerCard,
        vocab_blob: bytes,
        preparer: Preparer,
        ticks: TickLoop,
        shared: SharedState,
        slot_commands: CommandHandler,
        text_commands: CommandHandler,
    ) -> None:
        self._settings = settings
        self._card = card
        self._vocab_blob = vocab_blob
        self._preparer = preparer
        self._ticks = ticks
        self._shared = shared
        self._slot_commands = slot_commands
        self._text_commands = text_commands
        self._keys = Keys(settings.key_prefix)

    def make_access(self, redis: Redis) -> QueueAccess:
        """Return the access to the queue. `redis` is the client of all services, except the outbox."""
        queue = WorkerQueue(redis, self._keys, self._settings.queue, self._settings.partitions)
        stats = StatsWriter(WorkerScripts(redis, self._keys, self._card.worker), queue.name, self._shared.telemetry)
        return QueueAccess(queue, self._make_membership(queue), self._make_job_claims(queue, stats), stats)

    def make_services(
        self, access: QueueAccess, flush_connection: Redis, executor: Executor, on_empty: Callable[[], None]
    ) -> BrokerServices:
        """Return the services of a worker that has joined its queue, on the running event loop.

        Args:
            access: The access to the queue.
            flush_connection: The client of the outbox.
            executor: Its threads prepare jobs that take long.
            on_empty: Called when the queue is empty, if the worker then exits by itself.
        """
        settings, queue, job_claims = self._settings, access.queue, access.job_claims
        outbox = self._make_outbox(flush_connection, access.stats)
        others: list[Service] = [
            DeadlineSweep(queue, on_reply=job_claims.observe),
            AbandonedJobs(queue, disconnect_s=settings.disconnect_s, may_have_jobs=job_claims.may_have_jobs),
            *self._make_command_inboxes(queue.redis),
        ]
        if settings.exit_when_empty:
            others.append(EmptyQueueWatch(queue, settings.empty_s, on_empty=on_empty))
        return BrokerServices(
            job_claims,
            self._make_intake(job_claims, outbox, executor),
            outbox,
            self._make_heartbeat(queue),
            access.stats,
            access.membership,
            others,
        )

    def _make_membership(self, queue: WorkerQueue) -> QueueMembership:
        settings, card = self._settings, self._card
        config = QueueConfig(
            partitions=settings.partitions,
            max_queue=settings.max_queue,
            lease_ms=int(settings.lease_s * 1000),
            model=card.model_hash,
            model_name=card.model,
            kind=card.kind,
        )
        return QueueMembership(queue, card.worker, config)

    def _make_job_claims(self, queue: WorkerQueue, stats: StatsWriter) -> JobClaims:
        settings = self._settings
        claimant = Claimant(
            self._card.worker,
            int(settings.lease_s * 1000),
            self._card.model_hash,
            restart_other_model=settings.other_model == "restart",
        )
        return JobClaims(queue, claimant, max_crashes=settings.max_crashes, on_finished=stats.record_job)

    def _make_outbox(self, redis: Redis, stats: StatsWriter) -> Outbox:
        return Outbox(
            WorkerScripts(redis, self._keys, self._card.worker),
            self._ticks,
            self._shared.outputs,
            self._outbox_settings(),
            is_alive=lambda: self._ticks.liveness.is_alive,
            on_finished=stats.record_job,
        )

    def _outbox_settings(self) -> OutboxSettings:
        settings = self._settings
        return OutboxSettings(
            lease_s=settings.lease_s,
            disconnect_s=settings.disconnect_s,
            checkpoints=Checkpoints(settings.checkpoint_tokens, settings.checkpoint_s),
            retry_delay=RetryDelay(settings.retry_s, max(settings.retry_s, settings.max_retry_s)),
        )

    def _make_intake(self, job_claims: JobClaims, outbox: Outbox, executor: Executor) -> Intake:
        settings = self._settings
        n_slots = settings.n_parallel
        return Intake(
            job_claims,
            outbox,
            JobStarts(job_claims, outbox, self._preparer, executor, self._ticks.admit, n_slots),
            capacity=settings.capacity,
            bulk_share=BulkShare(settings.bulk_share, n_slots),
            is_alive=lambda: self._ticks.liveness.is_alive,
        )

    def _make_heartbeat(self, queue: WorkerQueue) -> Heartbeat:
        every_s = self._settings.beat_s
        return Heartbeat(queue, self._card, self._vocab_blob, self._ticks, self._shared, every_s=every_s)

    def _make_command_inboxes(self, redis: Redis) -> Sequence[CommandInbox]:
        worker, limit = self._card.worker, self._settings.max_request_bytes
        return (
            CommandInbox(redis, self._keys, worker, self._slot_commands),
            CommandInbox(redis, self._keys, worker, self._text_commands, TEXT_COMMANDS, max_bytes=limit),
        )

    def __repr__(self) -> str:
        return f"<BrokerFactory {self._card.worker} queue={self._card.queue!r}>"
