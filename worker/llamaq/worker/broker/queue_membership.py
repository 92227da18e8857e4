"""Joins a queue: compares the settings of this worker with those of the queue, and stores them for clients.

Afterwards the worker repairs the queue: it restores settings that were deleted, removes data of dead workers, and gives
lost jobs an entry again. Each partition is handled separately, so a partition that does not answer does not delay the
others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamaq.common.errors import InvalidSettings
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.queue_config import QueueConfig
from llamaq.common.redis.outage_log import OutageLog
from llamaq.worker.broker.live_workers import LiveWorkers
from llamaq.worker.broker.upkeep_scripts import UpkeepScripts
from llamaq.worker.broker.worker_queue import WorkerQueue

log = logging.getLogger(__name__)

UPKEEP_EVERY_S = 2.0
PARTITION_TIMEOUT_S = 3.0
"""How long one partition may take. A partition that does not answer is handled in the next round."""


class QueueMembership:
    """The membership of one worker in its queue.

    Threads: all methods run on the I/O thread.
    """

    def __init__(self, queue: WorkerQueue, worker_id: str, config: QueueConfig) -> None:
        """Create the object; `join` compares the settings.

        Args:
            queue: The queue of the worker.
            worker_id: The id of the worker.
            config: The settings of this worker.
        """
        self._queue = queue
        self._worker_id = worker_id
        self._config = config
        self._live_workers = LiveWorkers(queue, worker_id, config.lease_ms / 1000)
        self._scripts = UpkeepScripts(queue)

    async def join(self) -> None:
        """Compare this worker's settings with those of the queue, and store them.

        If no other worker is alive, this worker's settings replace those of the queue.

        Raises:
            InvalidSettings: A live worker of the queue has another number of partitions, or runs other jobs.
            RedisError: No partition answered.
        """
        stored = await self._in_each(self._queue.partitions, self._read)
        found = [config for config in stored if config is not None]
        if found and await self._live_workers.may_exist():
            self._compare(found[0])
        elif found and found[0].partitions != self._config.partitions:
            await self._change_partitions(found[0].partitions)
        await self._in_each(self._queue.partitions, self._store)

    async def _read(self, partition: int) -> QueueConfig | None:
        return await QueueConfig.read(self._queue.redis, self._queue.keys, self._queue.name, partition)

    async def _store(self, partition: int) -> None:
        fields: dict[Any, Any] = {**self._config.fields()}
        await self._queue.redis.hset(self._config_key(partition), mapping=fields)

    def _config_key(self, partition: int) -> str:
        return self._queue.keys.config(self._queue.name, partition)

    def _compare(self, queue: QueueConfig) -> None:
        own = self._config
        if queue.partitions != own.partitions:
            raise InvalidSettings(
                f"--partitions (LLAMAQ_PARTITIONS): this worker has {own.partitions}, but the live workers of queue "
                f"{self._queue!r} have {queue.partitions}. Use the same number, or stop them first"
            )
        if queue.kind != own.kind:
            raise InvalidSettings(
                f"--queue (LLAMAQ_QUEUE): the live workers of queue {self._queue.name!r} run {queue.kind} jobs, and "
                f"this worker runs {own.kind} jobs (--embeddings, --pooling). Use a queue of its own, or stop them "
                f"first"
            )
        if queue.lease_ms != own.lease_ms:
            log.warning(
                "queue.other_lease queue=%s: --lease-s of this worker is %g, another worker of the queue has %g",
                *(self._queue.name, own.lease_ms / 1000, queue.lease_ms / 1000),
            )
        if queue.model != own.model:
            log.warning(
                "queue.other_model queue=%s: this worker has the model %s, another worker of the queue has %s. A job "
                "that one model has begun is not continued by the other (--other-model)",
                *(self._queue.name, own.model_name, queue.model_name),
            )

    async def _change_partitions(self, before: int) -> None:
        """Replace the number of partitions, and name the jobs that no worker reads any more."""
        now = self._config.partitions
        log.warning("queue.partitions_changed queue=%s before=%d now=%d", self._queue.name, before, now)

        async def close_partition(partition: int) -> int:
            await self._queue.redis.hset(self._config_key(partition), "partitions", str(now))
            streams = [self._queue.job_stream(partition, priority) for priority in Priority]
            return sum([await self._queue.redis.xlen(stream) for stream in streams])

        mode: Any = await self._queue.redis.hget(self._config_key(0), "mode")
        await self._in_each(range(before, now), partial(self._set_mode, mode))
        n_left = sum(n or 0 for n in await self._in_each(range(now, before), close_partition))
        if n_left:
            log.warning(
                "queue.jobs_left queue=%s jobs=%d: they wait in partitions that no worker reads. Run a worker with "
                "--partitions %d until they have ended",
                *(self._queue.name, n_left, before),
            )

    async def _set_mode(self, mode: bytes | None, partition: int) -> None:
        """Store the mode of a partition. None: the default."""
        key = self._config_key(partition)
        await (self._queue.redis.hdel(key, "mode") if mode is None else self._queue.redis.hset(key, "mode", mode))

    async def run(self) -> None:
        """Keep the queue in order until cancelled."""
        outage = OutageLog(log, "queue")
        while True:
            await asyncio.sleep(UPKEEP_EVERY_S)
            live = [*(await self._live_workers.find() or ()), self._worker_id]
            try:
                await self._in_each(self._queue.partitions, partial(self._keep, live))
            except RedisError as exc:
                outage.record_failure(exc)
            else:
                outage.record_success()

    async def _keep(self, live_workers: list[str], partition: int) -> None:
        """Restore the settings of a partition if they were deleted, and repair its job streams."""
        key = self._config_key(partition)
        async with self._queue.redis.pipeline(transaction=False) as pipe:
            for name, value in self._config.fields().items():
                pipe.hsetnx(key, name, value)
            await pipe.execute()
        for job_id in await self._scripts.sweep(partition, live_workers):
            log.warning("job.repaired id=%s: no worker could claim it, because its stream entry was lost", job_id)

    async def leave(self) -> None:
        """Leave the consumer groups of all partitions, and requeue the entries that are still pending.

        Raises:
            RedisError: No partition answered. The entries are then reclaimed when their leases have expired.
        """
        await self._in_each(
            self._queue.partitions, lambda partition: self._scripts.leave_group(partition, self._worker_id)
        )

    async def _in_each(self, partitions: range, work: Callable[[int], Awaitable[Any]]) -> list[Any]:
        """Do `work` in all partitions at the same time, and return its results; None where a partition failed.

        Raises:
            RedisError: All partitions failed.
        """

        async def bounded(partition: int) -> Any:
            async with asyncio.timeout(PARTITION_TIMEOUT_S):
                return await work(partition)

        results = await asyncio.gather(*map(bounded, partitions), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        for error in failed:
            if not isinstance(error, RedisError | TimeoutError):
                raise error
        if failed and len(failed) == len(results):
            raise failed[0] if isinstance(failed[0], RedisError) else RedisTimeoutError("no reply in time")
        return [None if isinstance(result, BaseException) else result for result in results]

    def __repr__(self) -> str:
        return f"<QueueMembership {self._worker_id} queue={self._queue.name!r}>"
