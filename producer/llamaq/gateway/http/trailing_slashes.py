"""Answers a path that ends with `/` like the path without it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlashes:
    """Middleware that removes slashes from the end of a path.

    Starlette would redirect the request to an absolute URL. Behind a proxy with TLS, this URL begins with `http:`. A
    client would then send its prompt without encryption, and without its API key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self.app(scope, receive, send)
