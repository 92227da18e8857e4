"""/openapi.json describes every endpoint; the chat page at / loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import httpx
from starlette.testclient import TestClient

from llamaq.common.protocol.job_request import JobParams
from llamaq.gateway.app import ROUTES, build_app
from llamaq.gateway.openapi import QUERY
from llamaq.gateway.settings import serve_settings


def get(path: str) -> httpx.Response:
    # Without its lifespan, the application connects to no Redis.
    return TestClient(build_app(serve_settings())).get(path)  # type: ignore[return-value]


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(each) for each in value.values()))
    return set().union(*(references(each) for each in value)) if isinstance(value, list) else set()


def test_every_endpoint_is_described_and_every_reference_leads_to_a_schema() -> None:
    description = get("/openapi.json").json()
    assert set(description["paths"]) == {route.path.replace(":int}", "}") for route in ROUTES}
    operations = [operation for path in description["paths"].values() for operation in path.values()]
    assert all(operation["summary"].endswith(".") for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    schemas = {f"#/components/schemas/{name}" for name in description["components"]["schemas"]}
    assert references(description) <= schemas
    chat, response = (description["components"]["schemas"][name] for name in ("ChatRequest", "ResponseRequest"))
    assert set(JobParams.model_fields) <= set(response["properties"])
    assert set(JobParams.model_fields) - set(chat["properties"]) == {"delay_s", "run_at"}


def test_parameters_and_errors_are_described_as_the_endpoints_have_them() -> None:
    description = get("/openapi.json").json()
    operation = description["paths"]["/slots/{slot}"]["post"]
    assert [each["name"] for each in operation["parameters"]] == ["slot", "action", "model"]
    assert operation["parameters"][0]["schema"] == {"type": "integer", "minimum": 0}
    messages = description["paths"]["/v1/messages"]["post"]["responses"]["default"]["content"]["application/json"]
    assert messages["schema"]["$ref"].endswith("/MessageErrorBody")
    described = {(method, path) for path, one in description["paths"].items() for method in one}
    assert {(method.lower(), path) for method, path in QUERY} <= described


def test_a_path_that_ends_with_a_slash_is_answered_without_a_redirect() -> None:
    client = TestClient(build_app(serve_settings()), follow_redirects=False)
    assert client.get("/openapi.json/").json() == client.get("/openapi.json").json()
    assert client.post("/v1/models/").json() == client.post("/v1/models").json()


def test_the_chat_page_loads_nothing_from_elsewhere_and_parses_no_text_as_html() -> None:
    page = get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for kind, content in re.findall(r"<(style|script)>(.*?)</\1>", page.text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not re.findall(r"src=|href=(?!\"data:,\")|https?://[\w]|@import|url\(", page.text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", page.text)
