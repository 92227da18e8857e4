"""Which web pages may call a server, and which endpoints it has."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware

from llamaq.gateway.app import ROUTES, enabled_routes
from llamaq.gateway.http.cors import Cors, cors_options
from llamaq.gateway.http.errors import RequestRefused, respond_to_error


@pytest.mark.parametrize(
    ("origins", "origin", "is_allowed"),
    [
        (("localhost",), "http://localhost:3000", True),
        (("localhost",), "http://[::1]:3000", True),
        (("localhost",), "http://127.0.0.1", True),
        (("localhost",), "http://localhost.evil.example", False),
        (("localhost", "https://chat.example"), "https://chat.example", True),
        (("https://chat.example",), "http://localhost", False),
        (("*",), "https://any.example", True),
    ],
)
async def test_a_page_may_call_the_server_if_its_origin_is_allowed(
    origins: tuple[str, ...], origin: str, is_allowed: bool
) -> None:
    app = Starlette(middleware=[Middleware(Cors, **cors_options(origins))])
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "X-Key"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://llamaq") as http:
        answer = await http.options("/completions", headers=headers)
    assert answer.status_code == 200
    assert answer.headers.get("Access-Control-Allow-Origin") == (origin if is_allowed else None)
    assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS"


async def test_disabled_endpoints_are_refused() -> None:
    disabled = ("page", "metrics", "slots")
    app = Starlette(routes=enabled_routes(ROUTES, disabled), exception_handlers={RequestRefused: respond_to_error})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://llamaq") as http:
        statuses = [(await http.get(path)).status_code for path in ("/", "/metrics", "/slots", "/openapi.json")]
        answer = await http.get("/metrics")
        refused = answer.json()
        erased = await http.post("/slots/0?action=erase")
    assert statuses == [404, 501, 501, 200]
    assert (erased.status_code, "without /slots/0" in erased.text) == (501, True)
    assert answer.headers["x-should-retry"] == "false"
    assert refused["error"]["type"] == "not_supported_error"
    assert "disabled_endpoints" in refused["error"]["message"]
