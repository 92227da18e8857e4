"""Leaves out the endpoints that the setting `disabled_endpoints` names."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llamaq.gateway.http.errors import RequestRefused

PATHS = {"page": "/", "metrics": "/metrics", "props": "/props", "slots": "/slots"}
"""Maps a name in the setting to the path of its endpoint."""


def enabled_routes(routes: Sequence[Route], disabled: Sequence[str]) -> list[Route]:
    """Return the routes of a server. Its disabled endpoints answer 501, as with llama-server, and the page 404."""
    paths = {PATHS[name] for name in disabled}
    kept = [route for route in routes if route.path not in paths]
    return kept + [Route(path, _refuse, methods=["GET", "POST"]) for path in sorted(paths - {"/"})]


async def _refuse(request: Request) -> Response:
    path = request.url.path
    raise RequestRefused(
        HTTPStatus.NOT_IMPLEMENTED, f"this server runs without {path} (its setting disabled_endpoints)", code="disabled"
    )
