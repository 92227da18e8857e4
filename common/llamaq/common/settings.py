"""Settings of a client, and the settings that clients and workers share: the Redis server and the queue.

The value of a setting comes from the first of these sources that has it: the argument or flag, the environment variable
(`LLAMAQ_` and the name in capitals), the default. The environment is read when an instance is created, never on import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from llamaq.common.errors import InvalidSettings
from llamaq.common.logging_setup import LogFormat
from llamaq.common.protocol.job_request import MAX_PARTITIONS, QUEUE_PATTERN, TENANT_PATTERN

ENV_PREFIX = "LLAMAQ_"
DEFAULT_URL = "redis://localhost:6379/0"

S = TypeVar("S", bound=BaseSettings)

# The settings `log_level` and `log_format` of workers and of HTTP servers.
LogLevelSetting = Annotated[
    Literal["debug", "info", "warning", "error"],
    Field(description="Lowest level of log messages: `debug`, `info`, `warning` or `error`."),
]
LogFormatSetting = Annotated[
    LogFormat, Field(description="Form of log messages: `text`, or `json` with one object on each line.")
]


class QueueSettings(BaseSettings):
    """Redis and the queue. Clients and workers of one queue use the same values."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    redis_url: str = Field(
        DEFAULT_URL,
        repr=False,  # it may have a password
        description="URL of Redis: `redis://HOST:PORT/DB`, `unix:///PATH`, `redis+sentinel://HOST,HOST/NAME` or "
        "`redis+cluster://HOST,HOST`. `rediss` in place of `redis` turns on TLS.",
    )
    queue: str = Field(
        "default", pattern=QUEUE_PATTERN, description="Name of the queue: 1 to 64 letters, digits, `_` or `-`."
    )
    key_prefix: str = Field(
        "llamaq",
        pattern=r"^[A-Za-z0-9_\-:]{1,64}$",
        description="Prefix of every Redis key of llamaq: 1 to 64 letters, digits, `_`, `-` or `:`.",
    )
    partitions: int = Field(
        1,
        ge=1,
        le=MAX_PARTITIONS,
        description="Number of partitions of the queue. A Redis Cluster spreads them over its nodes.",
    )
    max_request_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, le=256 * 1024 * 1024, description="Largest size of an encoded request, in bytes."
    )


class ClientSettings(QueueSettings):
    """The settings of a client."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    timeout_s: float = Field(
        300.0, gt=0, description="Longest wait of a call, or of a stream for each chunk, in seconds."
    )
    require_worker: bool = Field(
        False,
        description="Whether calls raise `NoWorker` when no worker serves the queue, before they submit a job and "
        "while they wait for a job. By default jobs are submitted and wait.",
    )
    tenant: str | None = Field(
        None,
        pattern=TENANT_PATTERN,
        description="Tenant of the jobs that do not set `tenant`: 1 to 128 letters, digits or `_.:@/+=-`.",
    )
    result_ttl_s: float = Field(
        3600.0, gt=0, le=10**8, description="How long Redis stores a result after its job ended, in seconds."
    )
    event_ttl_s: float = Field(
        0.0,
        ge=0,
        le=10**8,
        description="How long Redis stores the events of a job after its end, in seconds. No reader needs these "
        "events, because the result contains all tokens. 0: they are deleted at the end.",
    )


def explain_settings(exc: ValidationError) -> InvalidSettings:
    """Return an error in one line that names the flag and the environment variable of each invalid setting."""
    lines = []
    for error in exc.errors(include_url=False, include_context=False):
        message = error["msg"].removeprefix("Value error, ")
        if not error["loc"]:
            lines.append(message)
            continue
        name = str(error["loc"][0])  # the other parts of "loc" are the path inside the value
        if error["type"] == "extra_forbidden":
            lines.append(f"{name}: there is no such setting")
            continue
        flag, variable = "--" + name.replace("_", "-"), ENV_PREFIX + name.upper()
        lines.append(f"{flag} ({variable}): {message}, got {str(error['input'])[:80]!r}")
    return InvalidSettings("; ".join(lines))


def build_settings(kind: type[S], values: Mapping[str, Any]) -> S:
    """Return settings of a kind; see `client_settings`."""
    try:
        return kind(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as exc:
        raise explain_settings(exc) from exc


def client_settings(**values: Any) -> ClientSettings:
    """Return the settings of a client.

    Args:
        values: Fields of `ClientSettings`. None stands for "not given".

    Raises:
        InvalidSettings: A value is not valid; the message names it.
    """
    return build_settings(ClientSettings, values)
