"""How to reach Redis and name a queue: what producers and workers have in common.

Flags and arguments win over `LLAMAQ_*` environment variables, which win over the defaults. Nothing is read from
the environment before an instance is made.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from llamaq.common.errors import InvalidSettings
from llamaq.common.protocol.job_request import QUEUE_PATTERN

ENV_PREFIX = "LLAMAQ_"
DEFAULT_URL = "redis://localhost:6379/0"


class QueueSettings(BaseSettings):
    """The connection and the queue."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    redis_url: str = Field(
        DEFAULT_URL,
        description="redis:// or unix://, redis+sentinel://HOST,HOST/NAME, redis+cluster://HOST,HOST; rediss for TLS",
    )
    queue: str = Field("default", pattern=QUEUE_PATTERN, description="name of the queue")
    key_prefix: str = Field("llamaq", pattern=r"^[A-Za-z0-9_\-:]{1,64}$", description="prefix of every Redis key")
    partitions: int = Field(1, ge=1, le=1024, description="streams a queue is split into; the same for all its users")
    max_request_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, le=256 * 1024 * 1024, description="the largest request that is sent or decoded"
    )


class ClientSettings(QueueSettings):
    """What a producer may set."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    timeout_s: float = Field(300.0, gt=0, description="how long generate() and result() wait")
    result_ttl_s: float = Field(3600.0, gt=0, le=10**8, description="how long a result lives after its job ended")


def explain_settings(exc: ValidationError) -> InvalidSettings:
    """One line for each bad setting, with the flag and the variable it is set by."""
    lines = []
    for error in exc.errors(include_url=False, include_context=False):
        message = error["msg"].removeprefix("Value error, ")
        if not error["loc"]:
            lines.append(message)
            continue
        name = str(error["loc"][0])  # what follows is a place within the value
        if error["type"] == "extra_forbidden":
            lines.append(f"{name}: there is no such setting")
            continue
        flag, variable = "--" + name.replace("_", "-"), ENV_PREFIX + name.upper()
        lines.append(f"{flag} ({variable}): {message}, got {str(error['input'])[:80]!r}")
    return InvalidSettings("; ".join(lines))


def client_settings(**values: Any) -> ClientSettings:
    """Settings out of these values, the environment and the defaults; raises `InvalidSettings`."""
    try:
        return ClientSettings(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as exc:
        raise explain_settings(exc) from exc
