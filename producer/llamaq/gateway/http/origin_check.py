"""Refuses what web pages of other origins send: a browser sends it even if CORS does not let them read the answer."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llamaq.gateway.http.cors import Cors, cors_options
from llamaq.gateway.http.errors import RequestRefused, error_response

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods of requests that change nothing. CORS already keeps their answers from pages of other origins."""
USUAL_PORTS = {"http": 80, "https": 443}


class OriginCheck:
    """Middleware that refuses a request that changes something if a web page of another origin sends it.

    Without it, any page that the user of a server without API keys visits could start jobs, or erase slots. Browsers
    name the origin of the page in the header `Origin` of such requests. Other programs do not send this header.
    """

    def __init__(self, app: ASGIApp, cors_origins: Sequence[str]) -> None:
        self.app = app
        self._is_allowed = Cors(app, **cors_options(cors_origins)).is_allowed_origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not _is_own(origin, headers) and not self._is_allowed(origin):
                await error_response(_refusal(origin), scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _is_own(origin: str, headers: Headers) -> bool:
    """Return whether a page of this server sends a request.

    A proxy may have replaced `Host`. Then the browser's own comparison helps, which it sends to `https:` and to
    `localhost`. No page can set this header.
    """
    if headers.get("sec-fetch-site") == "same-origin":
        return True
    scheme, _, authority = origin.partition("://")
    return bool(authority) and headers.get("host", "").lower() in (authority, f"{authority}:{USUAL_PORTS.get(scheme)}")


def _refusal(origin: str) -> RequestRefused:
    return RequestRefused(
        HTTPStatus.FORBIDDEN,
        f"pages of the origin {origin[:100]!r} may not use this server: add the origin to --cors-origins to allow it",
        code="origin_not_allowed",
    )
