"""What is stored of a response besides its job: the conversation, and the request fields that the response shows."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import Any

from pydantic import Field, JsonValue
from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.keys import JobId, Keys
from llamaq.common.protocol.wire_model import WireModel
from llamaq.gateway.http.errors import RequestRefused, not_found
from llamaq.gateway.http_keys import HttpKeys
from llamaq.gateway.responses.output_items import OutputItems
from llamaq.gateway.responses.tools import names_in_namespaces
from llamaq.producer.answer_parts.answer_format import CONTENT_ALONE, AnswerForm

ID_PREFIX = "resp_"
LONGEST_JOB_S = 7 * 24 * 3600
"""How much longer than a result a record is stored, unless a server sees the end of the job. A record expires a fixed
time after its job is due, but a result expires a fixed time after the end of its job. A job may therefore wait and run
for at most this time."""
SPARE_S = 60
"""How much longer than the result of its job a record is stored after a server has seen the end of the job."""
EXPIRE_TIMEOUT_S = 1.0
"""An answer does not wait longer for the new expiry of its record."""


class ResponseRecord(WireModel):
    """The stored part of a response. Its text, state and usage are those of its job."""

    model: str = Field(description="Name of the model that the response shows.")
    created_s: int = Field(description="Time of the request, in seconds since the epoch.")
    owner: str | None = Field(None, description="Name of the API key of the request. Only the same key may read it.")
    idempotency_key: str | None = Field(None, description="The idempotency key of its job.")
    is_background: bool = Field(False, description="Whether the request was answered before the job ended.")
    messages: list[dict[str, Any]] = Field(description="The conversation before the answer, without instructions.")
    n_new: int = Field(description="Number of messages at the end of `messages` that came with this request.")
    form: AnswerForm = Field(CONTENT_ALONE, description="How the answer is split into reasoning, content and calls.")
    has_logprobs: bool = Field(False, description="Whether the response shows the probabilities of its tokens.")
    shown: dict[str, JsonValue] = Field(description="Fields of the request that the response shows again.")

    @property
    def has_summary(self) -> bool:
        """Whether the request asks for a summary of the reasoning."""
        match self.shown.get("reasoning"):
            case {"summary": str()}:
                return True
        return False

    @property
    def names_in_namespaces(self) -> dict[str, dict[str, str]]:
        """The fields `name` and `namespace` of calls, by the names that the model writes."""
        return names_in_namespaces(self.shown.get("tools"))

    def encode(self, max_bytes: int) -> str:
        """Return the record as it is stored.

        Raises:
            InvalidRequest: It is larger than `max_bytes`.
        """
        encoded = self.model_dump_json()
        if (n_bytes := len(encoded.encode())) > max_bytes:
            raise InvalidRequest(
                f"store: the conversation and the fields to store have {n_bytes} bytes, more than "
                f"max_request_bytes={max_bytes}; use `store`: false, or begin a new conversation"
            )
        return encoded

    @property
    def new_messages(self) -> list[dict[str, Any]]:
        """The messages that came with this request."""
        return self.messages[len(self.messages) - self.n_new :]


def output_items_of(job_id: str, record: ResponseRecord) -> OutputItems:
    """Return the output of a response, without items yet."""
    return OutputItems(job_id, record.form, has_summary=record.has_summary, names=record.names_in_namespaces)


class ResponseStore:
    """The records of responses in Redis, each beside its job."""

    def __init__(self, redis: Redis, keys: Keys, ttl_s: float) -> None:
        self._redis = redis
        self._keys = HttpKeys(keys.prefix)
        self._ttl_s = int(ttl_s) + LONGEST_JOB_S

    async def save(self, job_id: str, encoded: str, request: JobRequest) -> None:
        """Store a record of `encode`, unless the response has one: Idempotency-Key has found an earlier response.

        The client may have disconnected before the earlier one was stored.

        Args:
            job_id: The job of the response.
            encoded: The record.
            request: The request of the job. Its delay is part of the time for which the record is stored.
        """
        ttl_s = self._ttl_s + _delay_s_of(request)
        await self._redis.set(self._keys.http_response(job_id), encoded, ex=ttl_s, nx=True)

    async def read(self, response_id: str, owner: str | None) -> tuple[str, ResponseRecord]:
        """Return the job id and the record of a response.

        Args:
            response_id: The id of the response.
            owner: Name of the API key that asks.

        Raises:
            RequestRefused: There is no such response, or it belongs to another key: 404.
        """
        job_id = response_id.removeprefix(ID_PREFIX)
        try:
            key = self._keys.http_response(job_id)
        except InvalidRequest as exc:
            raise missing(response_id) from exc
        stored: Any = await self._redis.get(key) if response_id.startswith(ID_PREFIX) else None
        record = codec.decode_json(ResponseRecord, stored)
        if record is None or record.owner != owner:
            raise missing(response_id)
        return job_id, record

    async def expire_with_result(self, job_id: str) -> None:
        """Let the record of a job that has ended expire soon after its result. If Redis fails, it expires later."""
        with suppress(RedisError, OSError):  # TimeoutError is a subclass
            async with asyncio.timeout(EXPIRE_TIMEOUT_S):
                ttl_s: Any = await self._redis.ttl(self._keys.of_job(job_id).job)
                if ttl_s > 0:
                    await self._redis.expire(self._keys.http_response(job_id), ttl_s + SPARE_S)

    async def delete(self, job_id: str) -> None:
        """Remove a record. The result of its job expires by itself."""
        await self._redis.unlink(self._keys.http_response(job_id))

    async def delete_with_result(self, job_id: str, record: ResponseRecord) -> None:
        """Remove a record, and its job, which exists and has ended. A repeated request gets a new job."""
        of_job, parsed = self._keys.of_job(job_id), JobId.parse(job_id)
        removed = [self._keys.http_response(job_id), of_job.job, of_job.events]
        if record.idempotency_key is not None:
            removed.append(self._keys.idempotency(parsed.queue, parsed.partition, record.idempotency_key))
        await self._redis.unlink(*removed)


def _delay_s_of(request: JobRequest) -> int:
    """Return in how many seconds a job is due: at most 10^11, which Redis accepts as an expiry."""
    return math.ceil(max(0.0, request.delay_s or 0.0, (request.run_at or 0.0) - time.time()))


def missing(response_id: str) -> RequestRefused:
    """Return the error for an unknown response."""
    return not_found(f"there is no response {response_id[:150]!r}: the id is wrong, or it has expired or was deleted")
