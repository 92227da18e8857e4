"""Classifies errors of Redis: the server refuses all writes, or the keys of one job have unexpected content."""

from __future__ import annotations

from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

_FULL = "command not allowed when used memory"
_JOB_KEY_ERRORS = (
    "WRONGTYPE", "not an integer", "not a valid float", "would overflow", "attempt to ", "bad argument",
    "arguments must be strings or integers", "Bad data format", "Missing bytes", "is damaged",
)  # fmt: skip
_WRITE_REFUSED = ("READONLY", "MASTERDOWN", "NOREPLICAS", "MISCONF", "LOADING", "NOPERM")
"""Error codes of Redis, which are in the text of an error inside a script. Outside scripts, redis-py removes most codes
and raises special classes instead."""
_WRITE_REFUSED_CLASSES = (
    ReadOnlyError, ClusterDownError, AskError, TryAgainError, NoPermissionError, BusyLoadingError
)  # fmt: skip


class DamagedJobKey(ResponseError):
    """A field of a job has content that no script of llamaq writes."""


def is_full(exc: BaseException) -> bool:
    """Return whether Redis has reached `maxmemory`. In a script the error is a plain `ResponseError`."""
    return isinstance(exc, OutOfMemoryError) or _FULL in str(exc)


def is_job_key_error(exc: BaseException) -> bool:
    """Return whether a script failed because of the content of one job's keys. A repeated call would fail again."""
    has_words = isinstance(exc, ResponseError) and any(words in str(exc) for words in _JOB_KEY_ERRORS)
    return has_words or isinstance(exc, DamagedJobKey)


def refuses_writes(exc: BaseException) -> bool:
    """Return whether the server refuses all writes for now: it is full, not the master, or not ready."""
    is_refusal = isinstance(exc, _WRITE_REFUSED_CLASSES) or any(code in str(exc) for code in _WRITE_REFUSED)
    return is_refusal or is_full(exc)
