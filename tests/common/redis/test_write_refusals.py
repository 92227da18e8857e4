"""Errors of Redis are classified: outside and inside scripts, and as the classes of redis-py."""

from __future__ import annotations

import pytest
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError, TryAgainError

from llamaq.common.redis.write_refusals import is_full, is_job_key_error, refuses_writes

IN_A_SCRIPT = "Error running script (call to f_1): @user_script:7: @user_script: 7: "


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), {"full", "refuses writes"}),
        (
            ResponseError(IN_A_SCRIPT + "-OOM command not allowed when used memory > 'maxmemory'."),
            {"full", "refuses writes"},
        ),
        (ReadOnlyError("You can't write against a read only replica."), {"refuses writes"}),
        (ResponseError(IN_A_SCRIPT + "-READONLY You can't write against a read only replica."), {"refuses writes"}),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), {"refuses writes"}),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots"), {"refuses writes"}),
        (TryAgainError("Multiple keys request during rehashing of slot"), {"refuses writes"}),
        (BusyLoadingError("Redis is loading the dataset in memory"), {"refuses writes"}),
        (ResponseError(IN_A_SCRIPT + "-WRONGTYPE Operation against a key"), {"fault"}),
        (ResponseError("user_script:31: attempt to compare number with nil"), {"fault"}),
        (ResponseError("increment or decrement would overflow"), {"fault"}),
        (ResponseError(IN_A_SCRIPT + "Bad data format in input."), {"fault"}),
        (ResponseError(IN_A_SCRIPT + "The user executing the script can't run this command or subcommand"), set()),
        (ResponseError(IN_A_SCRIPT + "Lua script attempted to access a non local key in a cluster node"), set()),
        (ResponseError("NOGROUP No such key or consumer group"), set()),
    ],
)
def test_each_error_is_classified(error: RedisError, expected: set[str]) -> None:
    found = {"full": is_full(error), "refuses writes": refuses_writes(error), "fault": is_job_key_error(error)}
    assert {name for name, is_so in found.items() if is_so} == expected
