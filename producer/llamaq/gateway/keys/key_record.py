"""The stored data of an API key. The key itself is not stored, only its SHA-256."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import QUEUE_PATTERN, Priority
from llamaq.common.protocol.output_params import MAX_SALT_CHARS
from llamaq.common.protocol.wire_model import StrictModel

SECRET_BYTES = 32
NAME_PATTERN = r"^[A-Za-z0-9_.\-]{1,64}$"


class KeyRecord(StrictModel):
    """The permissions and limits of one API key."""

    name: str = Field(
        pattern=NAME_PATTERN,
        description="Name of the key: 1 to 64 letters, digits, `_`, `.` or `-`. It is the tenant of its jobs.",
    )
    queues: tuple[Annotated[str, Field(pattern=QUEUE_PATTERN)], ...] = Field(
        (), description="Queues that the key may use. Empty: all."
    )
    priority: Priority = Field(
        Priority.INTERACTIVE,
        description="`bulk`: all jobs of the key are bulk jobs. `interactive`: the request decides.",
    )
    requests_per_minute: int | None = Field(
        None,
        ge=1,
        le=10**6,
        description="Number of requests per minute. A key may send this number of requests at once. After that, one "
        "more request is allowed every `60 / requests_per_minute` seconds. If not set: no limit.",
    )
    max_open: int | None = Field(
        None, ge=1, le=10**6, description="Largest number of requests at the same time. If not set: no limit."
    )
    cache_salt: str | None = Field(
        None,
        max_length=MAX_SALT_CHARS // 2,
        description="Only jobs with the same salt share KV cells. If not set: the name of the key. Empty: cells are "
        "shared with all jobs without a salt. The `cache_salt` of a request divides the jobs of a salt further.",
    )
    share_system_prompt: bool = Field(
        False,
        description="Whether chats of the key share the KV cells of their system messages with other keys of which "
        "this is true. Such keys can find out by guesses which system messages the others use.",
    )
    manage_slots: bool = Field(
        False,
        description="Whether the key may save, restore and erase the content of slots (POST `/slots/N`). The content "
        "may be that of another key.",
    )
    created_ms: int = Field(ge=0, description="Time when the key was added, in milliseconds since the epoch.")

    @model_serializer(mode="wrap")
    def _without_missing_permissions(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out permissions that the key does not have: servers of earlier versions refuse unknown fields."""
        return {name: value for name, value in write(self).items() if value is not False}

    def allows(self, queue: str) -> bool:
        """Return whether the key may use a queue."""
        return not self.queues or queue in self.queues

    def job_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a job of this key: the options of the request, and the options that the key sets."""
        own_salt = self.name if self.cache_salt is None else self.cache_salt
        salt = _joined_salt(own_salt, str(options.get("cache_salt") or ""))
        decided: dict[str, Any] = {"tenant": self.name, "cache_salt": salt}
        if self._shares_system_prompt(options):
            decided["cache_public"] = "system"
        if self.priority is Priority.BULK:
            decided["priority"] = Priority.BULK
        left = {name: value for name, value in options.items() if name != "cache_public"}
        return {**left, **decided}

    def _shares_system_prompt(self, options: Mapping[str, Any]) -> bool:
        """Return whether a job shares its system messages with other keys. A request may decide to share nothing."""
        is_chat = "messages" in options
        return self.share_system_prompt and is_chat and options.get("cache_public", "system") == "system"


def _joined_salt(of_key: str, of_request: str) -> str:
    """Return the salt of a job. No two pairs of salts have the same one, so that no request can choose the salt of
    another key.

    The first `/` separates the parts. In the salt of a key, `/` is written as `~1` and `~` as `~0`, as in a JSON
    pointer (RFC 6901).
    """
    escaped = of_key.replace("~", "~0").replace("/", "~1")
    return f"{escaped}/{of_request}" if of_request else escaped


def new_key(**fields: Any) -> tuple[str, KeyRecord]:
    """Return a new API key and its record. The name in the key tells people which key it is.

    Args:
        **fields: Fields of `KeyRecord`.

    Raises:
        InvalidRequest: A field is not valid.
    """
    try:
        record = KeyRecord(created_ms=time.time_ns() // 1_000_000, **fields)
    except ValidationError as exc:
        raise InvalidRequest(codec.explain(exc)) from exc
    return f"llamaq-{record.name}-{secrets.token_urlsafe(SECRET_BYTES)}", record


def hash_of(secret: str) -> str:
    """Return the hash under which a key is stored. A random key of 256 bits needs no slow hash."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
