"""Which web pages may call this server (CORS)."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from llamaq.gateway.http.errors import SHOULD_RETRY
from llamaq.gateway.http.request_ids import ANTHROPIC_HEADER, HEADER

ALL = "*"
LOCALHOST = "localhost"
LOCALHOST_PATTERN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
"""Matches the origins of pages on this machine, at any port."""


class Cors(CORSMiddleware):
    """Answers the preflight requests of browsers, which ask whether a page may call this server.

    A refusal is an answer without an allowed origin.
    """

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a preflight request. A refusal also has the status 200, as in llama-server."""
        response = super().preflight_response(request_headers)
        response.status_code = HTTPStatus.OK
        return response


def cors_options(origins: Sequence[str]) -> dict[str, Any]:
    """Return the options of the middleware for the setting `cors_origins`."""
    patterns = [pattern for name, pattern in ((ALL, ".*"), (LOCALHOST, LOCALHOST_PATTERN)) if name in origins]
    return {
        "allow_origins": [origin for origin in origins if origin not in (ALL, LOCALHOST)],
        "allow_origin_regex": "|".join(patterns) or None,
        "allow_methods": ["GET", "POST", "DELETE", "OPTIONS"],
        "allow_headers": ["*"],
        "expose_headers": [HEADER, ANTHROPIC_HEADER, "Retry-After", SHOULD_RETRY],
    }
