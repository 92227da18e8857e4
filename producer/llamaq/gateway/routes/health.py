"""GET /health: whether this server can serve."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from llamaq.gateway.context import context_of
from llamaq.gateway.http.json_body import json_response


async def health(request: Request) -> Response:
    """Return the status 200 if Redis answers, otherwise 503.

    Workers are not checked, because requests may wait for one.
    """
    await context_of(request).queues.default.redis.ping()
    return json_response({"status": "ok"})
