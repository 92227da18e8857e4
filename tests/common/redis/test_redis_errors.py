"""Why Redis refused: the same words come plain, out of a script, and as errors of redis-py's own."""

from __future__ import annotations

import pytest
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError, TryAgainError

from llamaq.common.redis.redis_errors import is_full, is_job_key_error, refuses_writes

IN_A_SCRIPT = "Error running script (call to f_1): @user_script:7: @user_script: 7: "


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), {"full", "unable"}),
        (ResponseError(IN_A_SCRIPT + "-OOM command not allowed when used memory > 'maxmemory'."), {"full", "unable"}),
        (ReadOnlyError("You can't write against a read only replica."), {"unable"}),
        (ResponseError(IN_A_SCRIPT + "-READONLY You can't write against a read only replica."), {"unable"}),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), {"unable"}),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots"), {"unable"}),
        (TryAgainError("Multiple keys request during rehashing of slot"), {"unable"}),
        (ResponseError(IN_A_SCRIPT + "-WRONGTYPE Operation against a key"), {"fault"}),
        (ResponseError("user_script:31: attempt to compare number with nil"), {"fault"}),
        (ResponseError("increment or decrement would overflow"), set()),
    ],
)
def test_each_refusal_is_what_it_is(error: ResponseError, expected: set[str]) -> None:
    found = {"full": is_full(error), "unable": refuses_writes(error), "fault": is_job_key_error(error)}
    assert {name for name, is_so in found.items() if is_so} == expected
