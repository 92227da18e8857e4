"""The script calls of a worker that take entries of job streams and claim their jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from llamaq.common.protocol import codec
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.script_source import source
from llamaq.common.protocol.script_types import (
    MAX_JOBS_IN_CALL,
    Attempt,
    Claimant,
    ClaimCode,
    ClaimOutcome,
    Entry,
    JobEntry,
    Reader,
    StreamEntries,
)
from llamaq.common.redis.write_refusals import DamagedJobKey

if TYPE_CHECKING:
    from redis.asyncio import Redis


def _claim_outcome(reply: list[Any]) -> ClaimOutcome:
    if reply[0] == b"error":
        return ResponseError(reply[1].decode(errors="replace"))
    if reply[0] != b"run":
        code: ClaimCode = reply[0].decode()
        return code
    try:
        return _attempt(*reply[1:])
    except (ValueError, TypeError) as exc:  # a field of the hash is not a number
        return DamagedJobKey(f"the reply to the claim is damaged: {exc}")


def _attempt(
    number: int,
    request: bytes,
    generated: int,
    waited_ms: int,
    queue_ms: int,
    slot_ms: int,
    left_ms: int,
    retries_left: int,
    token_times: bytes,
) -> Attempt:
    return Attempt(
        int(number),
        request,
        int(generated),
        waited_ms=float(waited_ms),
        queue_ms=None if queue_ms < 0 else float(queue_ms),
        slot_ms=float(slot_ms),
        left_ms=None if left_ms < 0 else float(left_ms),
        retries_left=None if retries_left < 0 else int(retries_left),
        token_times=token_times.decode(errors="replace"),
    )


def read_args(reader: Reader, streams: Sequence[str], count: int, total: int) -> list[Any]:
    """Return the arguments of read.lua."""
    claimant, numbers = reader.claimant, [reader.n_replies[stream] for stream in streams]
    claims = [claimant.worker, claimant.model, int(claimant.restart_other_model)]
    return [GROUP, count, claimant.lease_ms, min(total, MAX_JOBS_IN_CALL), *claims, reader.token, *numbers]


def entries_by_stream(reply: list[Any]) -> list[tuple[str, StreamEntries]]:
    """Return the entries of each stream in a reply of read.lua."""
    return [(stream.decode(), [entry_of(entry) for entry in entries]) for stream, entries in reply]


def entry_of(reply: list[Any]) -> Entry:
    """Return one entry of a reply."""
    entry_id, fields, *claimed = reply
    return Entry(entry_id, dict(zip(fields[::2], fields[1::2], strict=True)), *map(_claim_outcome, claimed))


class ClaimScripts:
    """Calls the scripts that read and claim jobs. Each method raises `RedisError` if Redis cannot execute them."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._keys = keys
        self._read, self._claim = (redis.register_script(source(name)) for name in ("read", "claim"))

    async def read(
        self, reader: Reader, streams: Sequence[str], count: int, total: int
    ) -> list[tuple[str, StreamEntries]]:
        """Read new entries of job streams that are on one Redis server, and claim their jobs.

        Args:
            reader: The process that reads.
            streams: The job streams.
            count: Number of entries to read from each stream at most.
            total: Number of entries to read from all streams together at most, from the first streams first.

        Returns:
            The entries of each stream. An entry has no outcome if it names no job of its partition, or if the requests
            of the jobs before it are large. At most `MAX_JOBS_IN_CALL` jobs are claimed.
        """
        return entries_by_stream(await self._read(keys=list(streams), args=read_args(reader, streams, count, total)))

    async def claim_jobs(
        self, entries: Sequence[JobEntry], claimant: Claimant, *, at_risk: bool = True
    ) -> list[ClaimOutcome]:
        """Claim the jobs of entries of one partition that a worker has read: begin new attempts, without a slot so far.

        Args:
            entries: The entries.
            claimant: The worker.
            at_risk: Whether the worker prepares the jobs at once, so that a crash of the worker counts against them.

        Returns:
            For each of the first entries, in the same order, the attempt, or a code if the job was not claimed, or the
            error of Redis. There are fewer outcomes than entries if there are many entries, or if their requests are
            large. The other jobs are unchanged: call again for them.
        """
        some = entries[:MAX_JOBS_IN_CALL]
        keys: list[str] = []
        values: list[int | str] = []
        for entry in some:
            of_job = self._keys.of_job(entry.job_id)
            keys += [of_job.job, of_job.events, entry.stream]
            values += [entry.entry_id, of_job.channel, "" if entry.from_attempt is None else entry.from_attempt]
        restart = int(claimant.restart_other_model)
        settings: list[Any] = [GROUP, claimant.worker, claimant.lease_ms, int(at_risk), claimant.model, restart]
        return [
            _claim_outcome(reply)
            for reply in await self._claim(keys=keys, args=[*settings, codec.encode_values(values)])
        ]
