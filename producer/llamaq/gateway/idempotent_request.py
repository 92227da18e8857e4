"""The record of a request with `Idempotency-Key`. Redis compares only single jobs of one queue with each other."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from redis.exceptions import RedisError

from llamaq.common.errors import LlamaqError
from llamaq.common.protocol.keys import JobId
from llamaq.gateway.http.errors import RequestRefused
from llamaq.gateway.http_keys import HttpKeys
from llamaq.producer import AsyncClient


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request that a client may repeat, to get the same jobs again."""

    key: str
    """The key of the request."""
    n_jobs: int

    def key_of_job(self, number: int) -> str:
        """Return the idempotency key of one of the jobs."""
        return f"{self.key}:{number}"

    @asynccontextmanager
    async def recorded(self, client: AsyncClient) -> AsyncIterator[None]:
        """Record the queue and the number of jobs, while the caller submits the jobs. If Redis accepts none of them,
        the record is removed: the caller may correct the request.

        The record expires before the first job does. Then only the jobs are compared.

        Raises:
            RequestRefused: The key belongs to a request with another queue, or with more or fewer jobs.
        """
        key, record = HttpKeys(client.keys.prefix).http_request(self.key), f"{self.n_jobs} {client.queue}"
        ttl_s = math.ceil(client.settings.result_ttl_s)
        is_new = await client.redis.set(key, record, ex=ttl_s, nx=True)
        earlier: Any = None if is_new else await client.redis.get(key)
        if earlier is not None and earlier != record.encode():
            raise RequestRefused(
                HTTPStatus.CONFLICT,
                "the Idempotency-Key belongs to a request with another model or another number of answers or inputs: "
                "use another key for another request",
                code="idempotency_conflict",
            )
        try:
            yield
        except LlamaqError:
            with suppress(RedisError, OSError):  # the caller gets the error of the jobs
                if is_new and not await self._has_jobs(client):
                    await client.redis.delete(key)
            raise

    async def _has_jobs(self, client: AsyncClient) -> bool:
        keys = [self.key_of_job(number) for number in range(self.n_jobs)]
        async with client.redis.pipeline(transaction=False) as pipe:
            for key in keys:
                partition = JobId.new(client.queue, client.connection.settings.partitions, key).partition
                pipe.exists(client.keys.idempotency(client.queue, partition, key))
            return any(await pipe.execute())
