"""Why Redis refused a command: because it takes no writes for now, or because of what lies under one job's keys."""

from __future__ import annotations

from redis.exceptions import (
    AskError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

_FULL = "command not allowed when used memory"
_FAULTS = ("WRONGTYPE", "not an integer", "attempt to ", "bad argument")
_UNABLE = ("READONLY", "MASTERDOWN", "NOREPLICAS", "MISCONF", "LOADING", "NOPERM")
"""As scripts pass it on. Outside of them redis-py makes errors of their own of most, and cuts these words off."""
_UNABLE_ERRORS = (ReadOnlyError, ClusterDownError, AskError, TryAgainError, NoPermissionError)


def is_full(exc: BaseException) -> bool:
    """Whether Redis has reached `maxmemory` and may not evict. Out of a script it comes as a plain `ResponseError`."""
    return isinstance(exc, OutOfMemoryError) or _FULL in str(exc)


def is_fault_of_a_job(exc: BaseException) -> bool:
    """Whether a script stumbled over what lies under a job's keys, which trying again does not mend."""
    return isinstance(exc, ResponseError) and any(words in str(exc) for words in _FAULTS)


def is_unable(exc: BaseException) -> bool:
    """Whether the server takes no writes for now, whatever they are about: it is full, not the master, not ready."""
    return isinstance(exc, _UNABLE_ERRORS) or is_full(exc) or any(words in str(exc) for words in _UNABLE)
