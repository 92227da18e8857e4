"""Gives every request an id."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
ANTHROPIC_HEADER = "Request-Id"
"""The same header under the name that Anthropic's clients read."""
_GIVEN = re.compile(r"[A-Za-z0-9._\-]{1,128}")


class RequestIds:
    """Middleware that writes the id of every request into its response: the client's own id, or a new one.

    The application finds it as `request.state.request_id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _GIVEN.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = headers[ANTHROPIC_HEADER] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)
