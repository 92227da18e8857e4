"""Looks for settings of the Redis server that endanger jobs."""

from __future__ import annotations

import logging
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

log = logging.getLogger(__name__)


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
