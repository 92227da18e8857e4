"""Makes dead letters of the entries and jobs that cannot run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pydantic import JsonValue
from redis.exceptions import ResponseError

from llamaq.common.errors import ErrorCode, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.attempt_scripts import MAX_DEAD
from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.keys import GROUP
from llamaq.common.protocol.output_params import MAX_GENERATED_TOKENS, MAX_SEED
from llamaq.common.protocol.script_types import JobEntry
from llamaq.worker.broker.worker_queue import WorkerQueue
from llamaq.worker.broker.worker_scripts import WorkerScripts
from llamaq.worker.engine_loop.telemetry import EndedJob

log = logging.getLogger(__name__)

MAX_DEAD_BYTES = 4096
"""Maximum size, in bytes, of the copy of an unusable entry that its dead letter contains."""


class DeadLetters:
    """The dead letters of one queue.

    Args:
        queue: The queue.
        scripts: The scripts that end jobs.
        on_finished: Called for each job that ended here.
    """

    def __init__(self, queue: WorkerQueue, scripts: WorkerScripts, on_finished: Callable[[EndedJob], None]) -> None:
        self._queue = queue
        self._scripts = scripts
        self._on_finished = on_finished

    async def bury_entry(self, stream: str, entry_id: str, fields: dict[bytes, bytes], reason: str) -> None:
        """Move an unusable entry from its job stream to the dead letters."""
        queue = self._queue
        dead_letters = queue.keys.dead(queue.name, queue.partition_of(stream))
        log.warning("entry.dead_lettered stream=%s entry=%s reason=%s", stream, entry_id, reason)
        content = repr(fields)[:MAX_DEAD_BYTES]
        letter: dict[Any, Any] = {"stream": stream, "entry": entry_id, "reason": reason, "held": content}
        async with queue.redis.pipeline(transaction=True) as pipe:
            pipe.xadd(dead_letters, letter, maxlen=MAX_DEAD)
            pipe.xack(stream, GROUP, entry_id)
            pipe.xdel(stream, entry_id)
            await pipe.execute()

    async def bury_job(self, entry: JobEntry, attempt: int | None, reason: str) -> None:
        """Fail a job that cannot continue, and make a dead letter of it."""
        log.warning("job.dead_lettered id=%s reason=%s", entry.job_id, reason)
        error = Failed(code=ErrorCode.DAMAGED, message=reason)
        if await self._scripts.bury(entry, attempt, error):
            await self.report_end(entry.job_id, ErrorCode.DAMAGED)

    async def report_end(self, job_id: str, code: ErrorCode) -> None:
        """Report a job that became a dead letter here. Parts of the job that cannot be read are left out."""
        stats = JobStats(worker=self._scripts.worker)
        metadata: dict[str, JsonValue] = {}
        with suppress(ResponseError, ProtocolError, ValueError, TypeError):
            fields: Any = ["generated", "returned"]
            stored: Any = await self._queue.redis.hmget(self._queue.keys.of_job(job_id).job, fields)
            generated, returned = stored
            generated_tokens = _stored_number(generated or 0, MAX_GENERATED_TOKENS)
            stats = stats.model_copy(update={"generated_tokens": generated_tokens})
            seed, metadata = codec.decode_returned(returned)
            stats = stats.model_copy(update={"seed": _stored_number(seed, MAX_SEED)})
        self._on_finished(EndedJob(job_id, stats, None, code.value, metadata))


def _stored_number(stored: bytes | int, largest: int) -> int:
    """Return a number of a job that another client of Redis may have written.

    Raises:
        ValueError: It is not an integer from 0 to `largest`. A larger one might not fit into the encoded stats.
    """
    number = int(stored)
    if not 0 <= number <= largest:
        raise ValueError("the number is out of its bounds")
    return number
