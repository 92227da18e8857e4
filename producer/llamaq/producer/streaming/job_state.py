"""The part of a job's hash that tells a waiting client how far the job is, and when it must end at the latest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol.job_outcome import JobState

STATE_FIELDS = (
    "status",
    "generated",
    "started_ms",
    "queue_deadline_ms",
    "deadline_ms",
    "run_at_ms",
    "attempt",
    "started_attempt",
)
"""The fields of the hash that `read_state` needs."""

RUNNING_GRACE_MS = 500
"""How long a client waits after the deadline of a running or preempted job; `RUNNING_GRACE_MS` in _lib.lua."""

_RUNNING = JobState.RUNNING.value.encode()
_OPEN = (JobState.QUEUED.value.encode(), _RUNNING)


class StoredState(NamedTuple):
    """The state of a job when it was read."""

    status: bytes | None
    """None: there is no such job."""
    n_tokens: int
    """Number of tokens stored so far."""
    due_ms: int | None
    """Time, by the clock of Redis, at which any client may end the job or give it its entry. None: never."""


def read_state(values: Sequence[bytes | None]) -> StoredState:
    """Return the state of a job from the values of `STATE_FIELDS`. Raises `ProtocolError` if one is not a number."""
    status, generated, started, queue_deadline, deadline, run_at, attempt, started_attempt = values
    try:
        n_tokens, queue_deadline_ms, deadline_ms, run_at_ms = (
            int(value or 0) for value in (generated, queue_deadline, deadline, run_at)
        )
    except ValueError as exc:
        raise ProtocolError(f"a field of the job's hash is not a number: {exc}") from exc
    has_run_in_worker = status == _RUNNING or (attempt is not None and attempt == started_attempt)
    due = [
        run_at_ms,
        queue_deadline_ms if started is None else 0,
        deadline_ms + RUNNING_GRACE_MS if deadline_ms and has_run_in_worker else deadline_ms,
    ]
    given = [time_ms for time_ms in due if time_ms > 0]
    return StoredState(status, n_tokens, min(given) if given and status in _OPEN else None)
