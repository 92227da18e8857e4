"""Clients of an HTTP server that runs in the event loop of the test, for the queue of a served worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
from tests.support.http_server import serving_http
from tests.support.lazy_import import lazy_import

if TYPE_CHECKING:
    import openai
    from tests.e2e.conftest import ServedQueue
else:
    openai = lazy_import("openai")


@asynccontextmanager
async def http_client(served: ServedQueue, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run a server with these settings of `llamaq serve`, and yield a client of it."""
    async with (
        serving_http(served.url, served.queue, **settings) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        yield http


@asynccontextmanager
async def openai_client(served: ServedQueue, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """Run a server with these settings of `llamaq serve`, and yield OpenAI's client of it, which retries nothing."""
    async with (
        serving_http(served.url, served.queue, **settings) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api
