"""The exit codes of the `llamaq` command, and the code for each error. docs/cli.md lists them."""

from __future__ import annotations

from redis.exceptions import RedisError

from llamaq.common.errors import (
    EmbeddedRedisError,
    InvalidRequest,
    InvalidSettings,
    LlamaqError,
    NoWorker,
    QueueFull,
    RedisFull,
    ResultTimeout,
)

EXIT_OK = 0
EXIT_FAILED = 1
"""The job failed, or the command failed for a reason that no other code names."""
EXIT_USAGE = 2
"""An argument, an option, a setting or a parameter of a job is not valid."""
EXIT_NO_REDIS = 3
"""Redis does not answer, or refuses the command."""
EXIT_NO_ANSWER = 4
"""No worker serves the queue, the queue is full, or the timeout was reached. A later call may succeed."""
EXIT_INTERRUPTED = 130
"""Ctrl-C ended the command."""

_CODES: dict[type[LlamaqError], int] = {
    InvalidRequest: EXIT_USAGE,
    InvalidSettings: EXIT_USAGE,
    EmbeddedRedisError: EXIT_NO_REDIS,
    RedisFull: EXIT_NO_REDIS,
    NoWorker: EXIT_NO_ANSWER,
    QueueFull: EXIT_NO_ANSWER,
    ResultTimeout: EXIT_NO_ANSWER,
}


def exit_code_of(error: LlamaqError | RedisError) -> int:
    """Return the exit code of a command that this error ended."""
    if isinstance(error, RedisError):
        return EXIT_NO_REDIS
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), EXIT_FAILED)
