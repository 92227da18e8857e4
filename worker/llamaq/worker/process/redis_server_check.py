"""Looks for a Redis server that is too old, and for settings of the server that endanger jobs."""

from __future__ import annotations

import logging
import re
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from llamaq.common.errors import InvalidSettings

log = logging.getLogger(__name__)

OLDEST_VERSION = (6, 2)
"""An older server does not know all commands and options that the scripts of llamaq use."""


async def refuse_old_server(redis: Redis) -> None:
    """Check the version of the server. Valkey and others report the version of Redis that they are compatible with.

    A Redis user may have no permission for INFO. Then nothing is checked.

    Raises:
        InvalidSettings: The server is too old.
        RedisError: The server cannot be reached.
    """
    try:
        server: dict[str, Any] = await redis.info("server")
    except ResponseError as exc:
        log.debug("redis.version_not_readable error=%s", exc)
        return
    version = str(server.get("redis_version", ""))
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST_VERSION:
        raise InvalidSettings(
            f"--redis-url (LLAMAQ_REDIS_URL): llamaq needs Redis 6.2 or newer, this is Redis {version}"
        )


async def log_dangers(redis: Redis) -> None:
    """Log a warning if the server may delete jobs, and a message if it stores no data on disk. Raises no error."""
    settings = await _read_settings(redis)
    policy, limit = settings.get("maxmemory-policy", "noeviction"), int(settings.get("maxmemory", 0))
    if policy != "noeviction" and limit:
        log.warning(
            "redis.may_evict maxmemory_policy=%s maxmemory=%d: when Redis reaches maxmemory, it deletes jobs and "
            "results; set maxmemory-policy to noeviction",
            policy,
            limit,
        )
    if settings.get("save") == "" and settings.get("appendonly") == "no":
        log.info("redis.not_persistent: a restart of Redis loses all jobs; to store them, set appendonly to yes")


async def _read_settings(redis: Redis) -> dict[str, str]:
    """Return those of `maxmemory`, `maxmemory-policy`, `save` and `appendonly` that can be read.

    A Redis user may have no permission for CONFIG and INFO.
    """
    try:
        settings: dict[str, Any] = {}
        for name in ("maxmemory*", "save", "appendonly"):  # Redis 6.2 accepts one pattern in a command
            found: Any = await redis.config_get(name)
            settings |= found
        return {_text(name): _text(value) for name, value in settings.items()}
    except RedisError as exc:
        log.debug("redis.config_not_readable error=%s", exc)
    try:
        memory: dict[str, Any] = await redis.info("memory")
    except RedisError as exc:
        log.debug("redis.info_not_readable error=%s", exc)
        return {}
    names = {"maxmemory": "maxmemory", "maxmemory-policy": "maxmemory_policy"}
    return {name: str(memory[field]) for name, field in names.items() if field in memory}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
