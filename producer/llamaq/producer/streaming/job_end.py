"""Reads from the hash of a job how the job ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llamaq.common.errors import ErrorCode, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Failed, Finished, TokenSpan
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats

END_FIELDS = ("status", "finish_reason", "stats", "error")
"""The fields of the hash that `decode_end` needs."""

MAX_QUICK_BYTES = 64 * 1024
"""Larger outputs are decoded on a thread, because logprobs take long."""
_ENDED = {JobState.FINISHED.value.encode(), JobState.FAILED.value.encode()}


def has_ended(status: bytes | None) -> bool:
    """Return whether the `status` field of a job's hash is final."""
    return status in _ENDED


def decode_end(values: Sequence[bytes | None]) -> Finished | Failed | None:
    """Return how a job ended. None: it has not ended.

    Args:
        values: The values of `END_FIELDS`.

    Raises:
        ProtocolError: A value cannot be decoded.
    """
    status, finish_reason, stats, error = values
    if not has_ended(status):
        return None
    if finish_reason is not None and status != JobState.FAILED.value.encode():
        measured = codec.decode_model(JobStats, stats) if stats is not None else JobStats()
        try:
            return Finished(finish_reason=FinishReason(finish_reason.decode()), stats=measured)
        except ValueError as exc:
            raise ProtocolError(f"the job's hash is damaged: {exc}") from exc
    return decode_error(error)


def decode_error(data: bytes | None) -> Failed:
    """Return the error of a failed job. Raises `ProtocolError` if it cannot be decoded."""
    event = codec.decode_event(data) if data is not None else None
    if isinstance(event, Failed):
        return event
    return Failed(code=ErrorCode.INTERNAL, message="the job failed, and its worker stored no reason")


async def decode_output(data: bytes) -> TokenSpan:
    """Return the output of a job. Raises `ProtocolError`."""
    if len(data) <= MAX_QUICK_BYTES:
        return codec.decode_output(data)
    return await asyncio.to_thread(codec.decode_output, data)
