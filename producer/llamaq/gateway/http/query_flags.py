"""Reads booleans in the queries of URLs."""

from __future__ import annotations

from starlette.requests import Request

from llamaq.gateway.http.errors import invalid

VALUES = {"true": True, "1": True, "false": False, "0": False}


def read_query_flag(request: Request, name: str) -> bool:
    """Return a boolean of the query, which is false if it is missing.

    Raises:
        RequestRefused: It is something else.
    """
    given = request.query_params.get(name, "false")
    if given not in VALUES:
        raise invalid(f"{name}: true, false, 1 or 0 is required, not {given[:50]!r}", name)
    return VALUES[given]
