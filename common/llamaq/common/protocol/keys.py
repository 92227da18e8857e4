"""Returns the names of all Redis keys and channels. Only gateway/http_keys.py composes more: those of the HTTP server.

In the table the key prefix is `llamaq`, the queue is `q` and the partition is `p`. The braces are the hash tag of Redis
Cluster: all keys of a partition are on one node, so one script can use all keys of a job.

| key                              | type             | life                                               |
| -------------------------------- | ---------------- | -------------------------------------------------- |
| llamaq:{q:p}:jobs:<priority>     | stream, group    | an entry is deleted when its job ends              |
| llamaq:{q:p}:turns:<priority>    | sorted set       | while tenants wait: the tenants, by their turns    |
| llamaq:{q:p}:turns:<priority>:<tenant> | sorted set | while the tenant waits: its waiting entries        |
| llamaq:{q:p}:shares:<priority>   | hash             | while tenants have jobs: numbers of claimed jobs   |
| llamaq:{q:p}:read:<priority>:<worker> | string      | ten minutes; the entries of the worker's last read |
| llamaq:{q:p}:wake:<reader>       | stream           | ten seconds; ends the wait of a worker that stops  |
| llamaq:{q:p}:job:<id>            | hash             | `result_ttl_s` after the job ended; a week if dead |
| llamaq:{q:p}:events:<id>         | stream of events | until the output is stored; else as the hash       |
| llamaq:{q:p}:tokens:<id>         | pub/sub channel  | not stored; receives the events of the stream      |
| llamaq:{q:p}:key:<sha256>        | string: job id   | as the hash of the job; for an `idempotency_key`   |
| llamaq:{q:p}:config              | hash             | no expiry; the settings that workers agree on      |
| llamaq:{q:p}:sweep               | hash             | no expiry; progress of the search for lost jobs    |
| llamaq:{q:p}:deadlines           | sorted set       | job ids by the time at which the jobs must end     |
| llamaq:{q:p}:later               | sorted set       | job ids without entry, by the time they are due    |
| llamaq:{q:p}:watched             | sorted set       | job ids by their next check for subscribers        |
| llamaq:{q:p}:metrics             | hash             | no expiry; counters of the jobs, for the metrics   |
| llamaq:{q:p}:dead                | stream, capped   | dead letters                                       |
| llamaq:{q}:stats                 | stream, capped   | stats of finished jobs                             |
| llamaq:{q}:workers               | sorted set       | worker ids by the time of their last heartbeat     |
| llamaq:queues                    | sorted set       | queues served in the last week, by last heartbeat  |
| llamaq:worker:<id>               | hash             | worker card and heartbeat; expires if not renewed  |
| llamaq:worker:<id>:orders        | list             | slot commands until the worker reads them          |
| llamaq:worker:<id>:texts         | list             | text commands until the worker reads them          |
| llamaq:reply:<command id>        | list             | reply to a command; expires after a minute         |
| llamaq:vocab:<sha256>            | string           | a vocabulary; expires when no worker uses it       |
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_request import JOB_ID_PATTERN, Priority

GROUP = "workers"
"""The consumer group of every job stream."""

_JOB_ID = re.compile(JOB_ID_PATTERN)
_JOB_STREAM = re.compile(rf"\{{([A-Za-z0-9_\-]{{1,64}}):([0-9]{{1,4}})\}}:jobs:(?:{'|'.join(Priority)})")
"""A job stream without the key prefix."""


@dataclass(frozen=True, slots=True)
class JobId:
    """The id of a job. It contains the queue and the partition: `default.0.5f0c…`."""

    queue: str
    partition: int
    digits: str

    @classmethod
    def new(cls, queue: str, partitions: int = 1, idempotency_key: str | None = None) -> Self:
        """Return a new id. Jobs with the same idempotency key are always in the same partition."""
        if idempotency_key is None:
            partition = secrets.randbelow(partitions)
        else:
            partition = int.from_bytes(hashlib.sha256(idempotency_key.encode()).digest()[:8]) % partitions
        return cls(queue, partition, secrets.token_hex(16))

    @classmethod
    def parse(cls, job_id: object) -> Self:
        """Return the parts of an id. Raises `InvalidRequest` if the value is not a job id."""
        if not isinstance(job_id, str) or not _JOB_ID.fullmatch(job_id):
            raise InvalidRequest(f"{repr(job_id)[:100]} is not a job id (QUEUE.PARTITION.32 hexadecimal digits)")
        queue, partition, digits = job_id.split(".")
        return cls(queue, int(partition), digits)

    @classmethod
    def find(cls, stored: bytes, queue: str, partition: int) -> Self | None:
        """Return the id that is stored in Redis for a partition of a queue.

        None: the bytes are no id of a job of this partition. Another client of Redis has written them.
        """
        try:
            job_id = cls.parse(stored.decode("ascii", "replace"))
        except InvalidRequest:
            return None
        return job_id if (job_id.queue, job_id.partition) == (queue, partition) else None

    def __str__(self) -> str:
        return f"{self.queue}.{self.partition}.{self.digits}"


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys and the channel of one job, and the job streams of its partition."""

    job: str
    events: str
    channel: str
    interactive: str
    bulk: str


@lru_cache(maxsize=256)
def priority_of(stream: str) -> Priority:
    """Return the priority of a job stream, whose key `Keys.jobs` returned."""
    return Priority.INTERACTIVE if stream.endswith(f":{Priority.INTERACTIVE}") else Priority.BULK


@dataclass(frozen=True, slots=True)
class Keys:
    """All key names with one prefix."""

    prefix: str = "llamaq"

    def _partition(self, queue: str, partition: int) -> str:
        return f"{self.prefix}:{{{queue}:{partition}}}"

    def jobs(self, queue: str, partition: int, priority: Priority) -> str:
        return f"{self._partition(queue, partition)}:jobs:{priority.value}"

    def job_streams(self) -> str:
        """Return the pattern of SCAN that the job streams of all queues match."""
        return f"{self.prefix}:{{*}}:jobs:*"

    def partition_of(self, stream: str) -> tuple[str, int] | None:
        """Return the queue and the partition of a job stream. None: the key is not a job stream."""
        found = _JOB_STREAM.fullmatch(stream.removeprefix(f"{self.prefix}:"))
        return None if found is None else (found[1], int(found[2]))

    def config(self, queue: str, partition: int) -> str:
        return f"{self._partition(queue, partition)}:config"

    def sweep(self, queue: str, partition: int) -> str:
        return f"{self._partition(queue, partition)}:sweep"

    def deadlines(self, queue: str, partition: int) -> str:
        """Return the key of the jobs that have a deadline. The scripts compose the same key."""
        return f"{self._partition(queue, partition)}:deadlines"

    def later(self, queue: str, partition: int) -> str:
        """Return the key of the jobs that were submitted for a later time. The scripts compose the same key."""
        return f"{self._partition(queue, partition)}:later"

    def watched(self, queue: str, partition: int) -> str:
        """Return the key of the jobs with `cancel_on_disconnect`. The scripts compose the same key."""
        return f"{self._partition(queue, partition)}:watched"

    def metrics(self, queue: str, partition: int) -> str:
        """Return the key of the counters of jobs. The scripts compose the same key."""
        return f"{self._partition(queue, partition)}:metrics"

    def wake(self, queue: str, partition: int, reader: str) -> str:
        """Return the key of the stream that ends the wait of a process of a worker for new entries."""
        return f"{self._partition(queue, partition)}:wake:{reader}"

    def dead(self, queue: str, partition: int) -> str:
        return f"{self._partition(queue, partition)}:dead"

    def idempotency(self, queue: str, partition: int, key: str) -> str:
        """Return the Redis key for an idempotency key, which is hashed, because users can choose any text."""
        return f"{self._partition(queue, partition)}:key:{hashlib.sha256(key.encode()).hexdigest()}"

    @lru_cache(maxsize=4096)  # noqa: B019  # keys are compared by value; a worker flushes the same jobs in every tick
    def of_job(self, job_id: str) -> JobKeys:
        """Return all keys of one job. Raises `InvalidRequest` if the text is not a job id."""
        parsed = JobId.parse(job_id)
        tag = self._partition(parsed.queue, parsed.partition)
        return JobKeys(
            job=f"{tag}:job:{job_id}",
            events=f"{tag}:events:{job_id}",
            channel=f"{tag}:tokens:{job_id}",
            interactive=self.jobs(parsed.queue, parsed.partition, Priority.INTERACTIVE),
            bulk=self.jobs(parsed.queue, parsed.partition, Priority.BULK),
        )

    def unusable_job(self, queue: str, partition: int, name: bytes) -> bytes:
        """Return the key of a hash where jobs are stored, which another client has named `name` instead of a job id."""
        return f"{self._partition(queue, partition)}:job:".encode() + name

    def stats(self, queue: str) -> str:
        return f"{self.prefix}:{{{queue}}}:stats"

    def workers(self, queue: str) -> str:
        return f"{self.prefix}:{{{queue}}}:workers"

    def queues(self) -> str:
        return f"{self.prefix}:queues"

    def worker(self, worker_id: str) -> str:
        return f"{self.prefix}:worker:{worker_id}"

    def slot_commands(self, worker_id: str) -> str:
        return f"{self.prefix}:worker:{worker_id}:orders"

    def text_commands(self, worker_id: str) -> str:
        return f"{self.prefix}:worker:{worker_id}:texts"

    def reply(self, command_id: str) -> str:
        return f"{self.prefix}:reply:{command_id}"

    def vocab(self, vocab_hash: str) -> str:
        return f"{self.prefix}:vocab:{vocab_hash}"
