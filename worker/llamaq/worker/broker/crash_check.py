"""Checks whether the last worker of a reclaimed job has crashed with the job."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamaq.common.protocol.script_source import source
from llamaq.common.protocol.script_types import Claimant, JobEntry
from llamaq.common.redis.write_refusals import refuses_writes
from llamaq.worker.broker.worker_queue import WorkerQueue
from llamaq.worker.broker.worker_scripts import CrashVerdict, WorkerScripts

HEARTBEAT_TIMEOUT_S = 1.0
"""How long a worker waits for the heartbeat of the last worker of a reclaimed job."""


class CrashCheck:
    """Decides by its last heartbeat whether a worker has crashed.

    A lease may also expire while its worker is alive, so the age of the worker's last heartbeat decides. A worker
    renews its leases every third of `lease_s`. When the lease of a dead worker expires, the worker's last heartbeat is
    therefore at least two thirds of `lease_s` old. A live worker sends a heartbeat every few seconds. A worker whose
    last heartbeat is older than half of `lease_s` counts as crashed. If this worker is alive after all, its next flush
    removes the crash from the count. A crash that ends the job cannot be removed. It counts only when the heartbeat is
    older than one and a half `lease_s`, so that a short stop of a worker ends no job.

    Args:
        queue: The queue.
        scripts: Counts the crashes.
        claimant: The worker that has reclaimed the jobs.
        max_crashes: A job fails after this many crashes in a row.
    """

    def __init__(self, queue: WorkerQueue, scripts: WorkerScripts, claimant: Claimant, max_crashes: int) -> None:
        self._queue = queue
        self._scripts = scripts
        self._beat_age = queue.redis.register_script(source("beat_age", __package__))
        self._claimant = claimant
        self._max_crashes = max_crashes

    async def check(self, entry: JobEntry) -> CrashVerdict:
        """Check whether the last worker of a reclaimed job crashed, and count the crash (`check_crash.lua`).

        Returns:
            `ok`: the job may be claimed. `suspect`: the job may be run while no other job runs here.
            `dead`: the job has failed. `stale`: another worker has claimed the job. `unsure`: one more crash would end
            the job, and its last worker may be alive. The worker that finds the job after one more lease decides.
        """
        queue = self._queue
        try:
            state: Any = await queue.redis.hmget(queue.keys.of_job(entry.job_id).job, ["at_risk", "worker"])
            last_worker = state[1].decode() if state[1] and state[0] else ""
            return await self._scripts.check_crash(
                entry,
                last_worker=last_worker,
                silent_ms=await self._silent_ms(last_worker) if last_worker else 0,
                dead_after_s=self._claimant.lease_ms / 2000,
                max_crashes=self._max_crashes,
            )
        except (ResponseError, ValueError) as exc:
            if refuses_writes(exc):
                raise
            return "ok"  # the job key has another type: the claim moves the entry to the dead letters

    async def _silent_ms(self, worker: str) -> int:
        """Return the age of a worker's last heartbeat. For a worker that is not in the list of workers, it is the time
        since the epoch, see `SILENT_LEASES`.

        The server with the list measures the age, because on a cluster the clocks of the nodes differ. The list may be
        on a node that does not answer. The jobs of other nodes must still be claimed. Then the worker counts as alive,
        because a death that is counted wrongly could end a job.
        """
        try:
            async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                return int(await self._beat_age(keys=[self._queue.keys.workers(self._queue.name)], args=[worker]))
        except (RedisConnectionError, RedisTimeoutError, TimeoutError):
            return 0

    def __repr__(self) -> str:
        return f"<CrashCheck of {self._queue!r}>"
