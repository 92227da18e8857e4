"""Reads the request of a claimed job, of any kind. The preparers turn it into a job."""

from __future__ import annotations

from llamaq.common.errors import ErrorCode, InvalidRequest, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import JobRequest
from llamaq.worker.core.job import Lease

QUICK_BYTES = 1024
"""Largest size of a request that is quick to prepare. The tokenizer needs about half a microsecond for each byte."""


def read_request(payload: bytes, lease: Lease, max_bytes: int) -> JobRequest:
    """Return the request of a claimed job, with the priority of its lease.

    Args:
        payload: The request as msgpack.
        lease: The job's entry in Redis. Its priority differs from that of the request after `set_priority`.
        max_bytes: Largest size of an encoded request.

    Raises:
        JobRejected: The request is not valid.
    """
    try:
        request = codec.decode_request(payload, max_bytes)
    except InvalidRequest as exc:
        raise JobRejected(ErrorCode.INVALID_REQUEST, str(exc)) from exc
    if request.priority is lease.priority:
        return request
    return request.model_copy(update={"priority": lease.priority})
