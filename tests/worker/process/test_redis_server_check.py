"""A worker warns of a Redis that may delete jobs."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock

import pytest
from redis import Redis

from llamaq.common.errors import InvalidSettings
from llamaq.common.redis.connect import connect
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.process.redis_server_check import log_dangers, refuse_old_server

pytestmark = pytest.mark.starts_processes


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    """A Redis whose settings the tests change."""
    with EmbeddedRedis() as server:
        yield server


async def warnings_of(url: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    caplog.set_level(logging.INFO)
    redis = connect(url, name="test")
    await log_dangers(redis)
    await redis.aclose()
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_an_evicting_redis_with_a_memory_limit_gives_a_warning_that_names_the_policy(
    server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    with Redis.from_url(server.url) as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        assert await warnings_of(server.url, caplog) == []  # without a limit nothing is evicted
        admin.config_set("maxmemory", "1gb")
        (warning,) = await warnings_of(server.url, caplog)
        assert "allkeys-lru" in warning
        assert "noeviction" in warning
        admin.config_set("maxmemory-policy", "noeviction")
        assert await warnings_of(server.url, caplog) == []


@pytest.mark.parametrize(("rules", "n_warnings"), [(("+@all", "-config"), 1), (("+@all", "-config", "-info"), 0)])
async def test_the_policy_is_also_found_without_the_permission_for_config(
    server: EmbeddedRedis, caplog: pytest.LogCaptureFixture, rules: tuple[str, ...], n_warnings: int
) -> None:
    name, password = f"user{secrets.token_hex(4)}", secrets.token_hex(8)
    with Redis.from_url(server.url) as admin:
        admin.config_set("maxmemory", "1gb")
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.execute_command("ACL", "SETUSER", name, "on", f">{password}", "~*", "&*", *rules)
        url = f"{server.url}{'&' if '?' in server.url else '?'}username={name}&password={password}"
        assert len(await warnings_of(url, caplog)) == n_warnings


async def test_a_redis_without_persistence_is_mentioned(
    server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    with Redis.from_url(server.url) as admin:
        assert admin.config_get("appendonly")["appendonly"] == "yes"
        await warnings_of(server.url, caplog)
        assert "redis.not_persistent" not in caplog.text
        admin.config_set("save", "")
        admin.config_set("appendonly", "no")  # switched on again, Redis writes a file, and ignores SIGTERM until then
        await warnings_of(server.url, caplog)
        assert "redis.not_persistent" in caplog.text


@pytest.mark.parametrize("version", ["6.0.16", "5.0.14", 5.0])
async def test_a_server_that_is_too_old_is_refused_with_its_version(version: str | float) -> None:
    redis = AsyncMock(**{"info.return_value": {"redis_version": version}})
    with pytest.raises(InvalidSettings, match=rf"Redis 6\.2 or newer, this is Redis {version}"):
        await refuse_old_server(redis)


@pytest.mark.parametrize("version", ["6.2.0", "7.0.15", "10.0.1", "255.255.255", "unstable", ""])
async def test_a_server_that_is_new_or_tells_no_version_is_accepted(version: str) -> None:
    await refuse_old_server(AsyncMock(**{"info.return_value": {"redis_version": version}}))


async def test_the_version_is_not_checked_without_a_permission_for_it(server: EmbeddedRedis) -> None:
    redis: Any = connect(server.url, name="test")
    await redis.execute_command("ACL", "SETUSER", "blind", "on", "nopass", "~*", "+@all", "-info")
    await redis.execute_command("AUTH", "blind", "x")
    await refuse_old_server(redis)
    await redis.aclose()
