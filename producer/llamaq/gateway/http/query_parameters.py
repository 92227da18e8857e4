"""Reads the parameters of queries: booleans, and which page of a list a client asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from llamaq.gateway.http.errors import invalid

FLAGS = {"true": True, "1": True, "false": False, "0": False}


def read_query_flag(request: Request, name: str) -> bool:
    """Return a boolean of the query, which is false if it is missing.

    Raises:
        RequestRefused: It is something else.
    """
    given = request.query_params.get(name, "false")
    if given not in FLAGS:
        raise invalid(f"{name}: true, false, 1 or 0 is required, not {given[:50]!r}", name)
    return FLAGS[given]


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list a request asks for."""

    limit: int
    after: str | None
    """The id of the last object of the previous page. None: the first page."""
    is_ascending: bool
    """Whether the oldest object is the first."""


def read_page(request: Request, *, most: int, default: int) -> Page:
    """Return which page a request asks for by `limit`, `after` and `order`.

    Args:
        request: The request.
        most: Largest number of objects in a page.
        default: Number of objects without `limit`.

    Raises:
        RequestRefused: A parameter is not valid.
    """
    limit, order = request.query_params.get("limit", str(default)), request.query_params.get("order", "desc")
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= most:
        raise invalid(f"limit: a number from 1 to {most} is required", "limit")
    if order not in ("asc", "desc"):
        raise invalid("order: 'asc' or 'desc' is required", "order")
    return Page(int(limit), request.query_params.get("after"), order == "asc")


def page_of(objects: Sequence[dict[str, Any]], page: Page) -> dict[str, Any]:
    """Return a page of objects.

    Args:
        objects: All objects, the oldest first.
        page: The page.

    Raises:
        RequestRefused: There is no object with the id `after`.
    """
    ordered = list(objects) if page.is_ascending else list(reversed(objects))
    if page.after is not None:
        places = [place for place, each in enumerate(ordered) if each["id"] == page.after]
        if not places:
            raise invalid("after: the list has no object with this id", "after")
        ordered = ordered[places[0] + 1 :]
    return {"object": "list", **page_fields(ordered[: page.limit], has_more=len(ordered) > page.limit)}


def page_fields(shown: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return the fields of a page with these objects."""
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"data": shown, **ends, "has_more": has_more}
