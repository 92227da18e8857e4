"""The part of a job's hash that tells a waiting client how far the job is, and when it must end at the latest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamaq.common.protocol.job_outcome import JobState

STATE_FIELDS = ("status", "generated", "started_ms", "queue_deadline_ms", "deadline_ms")
"""The fields of the hash that `read_state` needs."""

RUNNING_GRACE_MS = 500
"""How long a client waits after the deadline of a running job; `RUNNING_GRACE_MS` in _lib.lua."""

_RUNNING = JobState.RUNNING.value.encode()
_OPEN = (JobState.QUEUED.value.encode(), _RUNNING)


class StoredState(NamedTuple):
    """The state of a job when it was read."""

    status: bytes | None
    """None: there is no such job."""
    n_tokens: int
    """Number of tokens stored so far."""
    due_ms: int | None
    """Time, by the clock of Redis, at which any client may end the job. None: it has no deadline."""


def read_state(values: Sequence[bytes | None]) -> StoredState:
    """Return the state of a job from the values of `STATE_FIELDS`."""
    status, generated, started, queue_deadline, deadline = values
    due = [
        int(queue_deadline or 0) if started is None else 0,
        int(deadline or 0) + (RUNNING_GRACE_MS if deadline not in (None, b"0") and status == _RUNNING else 0),
    ]
    given = [time_ms for time_ms in due if time_ms > 0]
    return StoredState(status, int(generated or 0), min(given) if given and status in _OPEN else None)
