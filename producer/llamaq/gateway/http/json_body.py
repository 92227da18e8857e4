"""Reads the JSON object of a request."""

from __future__ import annotations

from http import HTTPStatus
from math import isfinite
from typing import Any

from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.wire_model import parts_of
from llamaq.gateway.http.errors import RequestRefused, invalid

BOM = b"\xef\xbb\xbf"
"""Some programs write it at the beginning of a text."""
MAX_DEPTH = 64
"""Deepest nesting of arrays and objects. JSON schemas and metadata of real requests stay far below."""


async def read_object(request: Request) -> dict[str, Any]:
    """Return the JSON object that a request has as its body.

    Raises:
        RequestRefused: The body is compressed, is no JSON object, or is nested too deeply.
    """
    encoding = request.headers.get("content-encoding", "identity").strip()
    if encoding.lower() not in ("", "identity"):
        raise RequestRefused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding: llamaq does not support {encoding[:50]!r}; send the body without a compression",
            code="unsupported_encoding",
        )
    return decode_object(await request.body())


def decode_object(text: bytes, name: str = "the body") -> dict[str, Any]:
    """Parse a text that must be a JSON object.

    Args:
        text: The encoded JSON.
        name: What the text contains. Error messages begin with it.

    Raises:
        RequestRefused: The text is no JSON object, is nested too deeply, or has a number that is too large.
        InvalidRequest: The object has too many parts.
    """
    if not text.strip():
        raise invalid(f"{name} is empty: a JSON object is required")
    try:
        value = from_json(text.removeprefix(BOM), allow_inf_nan=False)
    except ValueError as exc:
        raise RequestRefused(HTTPStatus.BAD_REQUEST, f"{name} is not valid JSON: {exc}", code="invalid_json") from exc
    if not isinstance(value, dict):
        raise invalid(f"{name} is no JSON object")
    if not is_finite(value):  # `from_json` reads 1e999 as infinity, which no answer could repeat
        raise RequestRefused(HTTPStatus.BAD_REQUEST, f"{name} has a number that is too large", code="invalid_json")
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        check_depth(value, name)
    return value


def is_finite(value: Any) -> bool:
    """Return whether JSON can represent all numbers of a decoded value.

    Raises:
        InvalidRequest: The value has too many parts.
    """
    return all(not isinstance(part, float) or isfinite(part) for part in parts_of(value))


def check_depth(value: Any, name: str = "the body") -> None:
    """Check that a value is not nested too deeply, without recursion.

    Raises:
        RequestRefused: It is nested too deeply.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        children: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                children.extend(each.values())
            elif isinstance(each, list):
                children.extend(each)
        if not children:
            return
        level = children
    raise invalid(f"{name} is nested more than {MAX_DEPTH} levels deep")


def json_response(value: Any) -> Response:
    """Return a response with a value as JSON. It is several times faster than Starlette's."""
    return Response(to_json(value), media_type="application/json")
