"""Which web pages may call a server, and which endpoints it has."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.support.http_server import serving_http

from llamaq.gateway.app import ROUTES, enabled_routes
from llamaq.gateway.http.cors import Cors, cors_options
from llamaq.gateway.http.errors import RequestRefused, respond_to_error
from llamaq.gateway.http.origin_check import OriginCheck
from llamaq.producer import AsyncClient


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


OWN = "http://llamaq:8080"


@pytest.mark.parametrize(
    ("origins", "headers", "is_accepted"),
    [
        ((), {}, True),
        ((), {"Origin": OWN}, True),
        ((), {"Origin": "http://llamaq", "Host": "LLAMAQ"}, True),
        ((), {"Origin": "https://llamaq", "Host": "llamaq:443"}, True),
        ((), {"Origin": "https://chat.example", "Sec-Fetch-Site": "same-origin"}, True),
        ((), {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, False),
        ((), {"Origin": "https://evil.example"}, False),
        ((), {"Origin": "http://llamaq:3000"}, False),
        ((), {"Origin": "http://llamaq"}, False),
        ((), {"Origin": "http://llamaq.evil.example:8080"}, False),
        ((), {"Origin": "null"}, False),
        ((), {"Origin": "file://", "Host": ""}, False),
        ((), {"Origin": ""}, False),
        (("localhost",), {"Origin": "http://localhost:3000"}, True),
        (("localhost",), {"Origin": "null"}, False),
        (("https://chat.example",), {"Origin": "https://chat.example"}, True),
        (("https://chat.example",), {"Origin": "https://evil.example"}, False),
        (("null",), {"Origin": "null"}, True),
        (("*",), {"Origin": "null"}, True),
        (("*",), {"Origin": "https://any.example"}, True),
    ],
)
@pytest.mark.parametrize("method", ["POST", "DELETE", "GET"])
async def test_a_page_of_another_origin_changes_nothing(
    origins: tuple[str, ...], headers: dict[str, str], is_accepted: bool, method: str
) -> None:
    async def answer(_: Request) -> Response:
        return Response()

    routes = [Route("/", answer, methods=["POST", "DELETE", "GET"])]
    app = Starlette(routes=routes, middleware=[Middleware(OriginCheck, cors_origins=origins)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=OWN) as http:
        answered = await http.request(method, "/", headers=headers)
    assert answered.status_code == (200 if is_accepted or method == "GET" else 403)
    if answered.is_error:
        assert answered.json()["error"]["code"] == "origin_not_allowed"
        assert "--cors-origins" in answered.text


async def test_a_page_without_cors_starts_no_job_and_a_page_with_cors_reads_the_refusal_of_a_key(
    redis_url: str, queue: str
) -> None:
    allowed = {"Origin": "https://chat.example"}
    # Chromium sends these headers for `fetch(url, {method: "POST", mode: "no-cors", body: text})`.
    evil = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    simple = {**evil, "Content-Type": "text/plain;charset=UTF-8"}
    body = '{"input": "hi", "background": true}'
    async with (
        AsyncClient(redis_url, queue) as client,
        serving_http(redis_url, queue) as url,
        serving_http(redis_url, queue, cors_origins="https://chat.example", require_key=True) as guarded,
        httpx.AsyncClient(timeout=60) as http,
    ):
        refused = await http.post(f"{url}/v1/responses", content=body, headers=simple)
        uploaded = await http.post(f"{url}/v1/files", files={"file": b"x"}, data={"purpose": "batch"}, headers=evil)
        waiting = (await client.queue_depth()).waiting
        own = await http.post(f"{url}/v1/responses", content=body, headers={"Origin": url})
        unknown = await http.post(f"{guarded}/v1/responses", content=body, headers=allowed)
        other = await http.post(f"{guarded}/v1/responses", content=body, headers=simple)
    assert [each.status_code for each in (refused, uploaded, own, unknown, other)] == [403, 403, 200, 401, 403]
    assert waiting == 0
    assert unknown.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-origin" not in other.headers
    assert refused.headers["x-request-id"]


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
