"""Middleware that lets only requests with a valid API key pass, within the limits of the key."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

from redis.exceptions import RedisError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llamaq.common.background_tasks import cancel_tasks
from llamaq.gateway.http.errors import RequestRefused, error_response
from llamaq.gateway.keys.key_record import KeyRecord
from llamaq.gateway.keys.key_store import OPEN_LEASE_MS, KeyStore

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/openapi.json"})
"""Paths that need no key: probes of load balancers, the chat page, the description of the API."""


class KeyCheck:
    """Refuses requests without a valid key, and requests beyond the limits of their key.

    The application finds the key as `request.state.api_key`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)
            return
        store: KeyStore = scope["app"].state.context.keys
        try:
            record = await store.find(secret_of(Headers(scope=scope)))
            if record is None:
                raise RequestRefused(
                    HTTPStatus.UNAUTHORIZED,
                    "a valid API key is required: Authorization: Bearer KEY (llamaq keys add)",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            scope["state"]["api_key"] = record
            async with counted(store, record):
                await self.app(scope, receive, send)
        except (RequestRefused, RedisError) as exc:
            await error_response(exc, scope)(scope, receive, send)


def secret_of(headers: Headers) -> str:
    """Return the key of a request: OpenAI's clients send a bearer token, Anthropic's `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


@asynccontextmanager
async def counted(store: KeyStore, record: KeyRecord) -> AsyncIterator[None]:
    """Count a request as open within this context.

    Raises:
        RequestRefused: The key has reached a limit.
    """
    if record.requests_per_minute is None and record.max_open is None:
        yield
        return
    request_id = secrets.token_hex(16)
    wait_s = await store.admit(record, request_id)
    if wait_s:
        raise RequestRefused(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"the API key {record.name!r} has reached its limit of requests: try again in {wait_s:.3g} s",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(math.ceil(wait_s))},
        )
    renewing = asyncio.create_task(_renew(store, record, request_id))
    try:
        yield
    finally:
        await cancel_tasks(renewing)
        with suppress(RedisError, OSError):  # the record of the request expires
            await asyncio.shield(store.release(record, request_id))


async def _renew(store: KeyStore, record: KeyRecord, request_id: str) -> None:
    while True:
        await asyncio.sleep(OPEN_LEASE_MS / 1000 / 3)
        try:
            await store.admit(record, request_id)
        except (RedisError, OSError) as exc:
            log.warning("key.not_renewed name=%s error=%s", record.name, exc)
