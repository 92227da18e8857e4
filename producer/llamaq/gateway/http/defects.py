"""Answers requests that a defect of this server has ended."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from llamaq.gateway.http.errors import error_response
from llamaq.gateway.http.open_requests import SentResponse


class Defects:
    """Middleware that answers a request when its endpoint raises an exception that it should not raise.

    Starlette also answers it, but outside of all other middleware: without the id of the request, and without the
    headers that let a web page of another origin read the answer. The exception is raised again, so it is logged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        response = SentResponse(send)
        try:
            await self.app(scope, receive, response)
        except Exception as exc:
            if not response.has_begun:
                await error_response(exc, scope)(scope, receive, response)
            raise
