"""Settings of the RQ side: its Redis server and the name of its queue."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from redis import Redis

from llamaq.common.errors import InvalidSettings
from llamaq.common.redis.url import Topology, read_url
from llamaq.common.settings import ENV_PREFIX, build_settings, client_settings


class RqSettings(BaseSettings):
    """RQ's Redis and RQ's queue. `llamaq bulk submit` and `llamaq bulk worker` use the same values."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    rq_url: str | None = Field(
        None,
        description="URL of RQ's Redis: `redis://HOST:PORT/DB`, `rediss://...` or `unix:///PATH`. RQ needs a single "
        "server. If not set: `redis_url`.",
    )
    rq_queue: str = Field(
        "llamaq-bulk", pattern=r"^[A-Za-z0-9_\-.:]{1,64}$", description="Name of the RQ queue with the bulk runs."
    )


def rq_settings(**values: Any) -> RqSettings:
    """Return the settings of the RQ side.

    Args:
        values: Fields of `RqSettings`. None stands for "not given".

    Raises:
        InvalidSettings: A value is not valid; the message names it.
    """
    return build_settings(RqSettings, values)


def connect_rq(settings: RqSettings, redis_url: str | None = None) -> Redis:
    """Return a connection to RQ's Redis.

    Args:
        settings: The settings of the RQ side.
        redis_url: URL of llamaq's Redis, which is used if `rq_url` is not set. None: the setting.

    Raises:
        InvalidSettings: RQ cannot use the server, because the URL names a cluster or Sentinels, or is not valid.
    """
    url = settings.rq_url or client_settings(redis_url=redis_url).redis_url
    if read_url(url).topology is not Topology.SERVER:
        raise InvalidSettings(
            "--rq-url (LLAMAQ_RQ_URL): RQ needs a single Redis server, and cannot use a Redis Cluster or Sentinels. "
            "Name a server for RQ, such as redis://HOST:6379/0"
        )
    try:
        return Redis.from_url(url)
    except ValueError as exc:
        raise InvalidSettings(f"--rq-url (LLAMAQ_RQ_URL): {exc}") from exc
