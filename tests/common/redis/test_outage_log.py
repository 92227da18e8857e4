from __future__ import annotations

import logging

import pytest
from redis.exceptions import BusyLoadingError, OutOfMemoryError
from redis.exceptions import ConnectionError as RedisConnectionError

from llamaq.common.redis.outage_log import REPEAT_S, OutageLog

log = logging.getLogger(__name__)


def test_an_outage_is_logged_once_then_seldom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now_s = 0.0
    outage = OutageLog(log, "test", lambda: now_s)
    for second in range(150):
        now_s = float(second)
        outage.record_failure(RedisConnectionError("refused") if second % 2 else BusyLoadingError("loading"))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (1 + int(149 // REPEAT_S))
    outage.record_failure(OutOfMemoryError("command not allowed when used memory > 'maxmemory'."))
    outage.record_success()
    assert [record.getMessage().split()[0] for record in caplog.records[-2:]] == [
        "test.redis_full",
        "test.redis_recovered",
    ]


def test_a_redis_that_fails_and_recovers_again_and_again_gives_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = OutageLog(log, "test", lambda: 5.0)
    for _ in range(20):
        outage.record_failure(RedisConnectionError("refused"))
        outage.record_success()
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert len(caplog.records) == 40
