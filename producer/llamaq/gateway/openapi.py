"""Describes the endpoints in the form of OpenAPI 3.1, from the routes and from the fields of a job."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from llamaq.common.protocol.job_request import JobParams
from llamaq.gateway.openapi_schemas import BODIES, FORMS, WITH_JOB_OPTIONS, ErrorBody, MessageErrorBody, ResponseRequest
from llamaq.gateway.queue_of_request import DELAYS

Parameter = tuple[str, dict[str, Any], str]
"""Name, schema and meaning."""

FLAG = {"enum": ["true", "false", "1", "0"]}
_MODEL: Parameter = ("model", {"type": "string"}, "Name of a queue, of its model, or of a LoRA adapter of its workers.")
_PAGE: Sequence[Parameter] = (
    ("limit", {"type": "integer", "minimum": 1}, "Largest number of objects in the list."),
    ("after", {"type": "string"}, "The id of the last object of the page before."),
    ("order", {"enum": ["asc", "desc"]}, "`asc`: the oldest object is the first."),
)
PATH: Mapping[str, dict[str, Any]] = {"slot": {"type": "integer", "minimum": 0}}
"""Schemas of the parameters in paths. The others are texts."""
QUERY: Mapping[tuple[str, str], Sequence[Parameter]] = {
    ("GET", "/props"): (_MODEL,),
    ("GET", "/tokenizer_info"): (_MODEL,),
    ("GET", "/slots"): (_MODEL, ("fail_on_no_slot", FLAG, "Answer 503 if all slots are busy.")),
    ("POST", "/slots/{slot}"): (
        ("action", {"enum": ["save", "restore", "erase"]}, "What to do with the state of the slot."),
        _MODEL,
    ),
    ("GET", "/v1/responses/{response}"): (
        ("stream", FLAG, "Return the events of the response."),
        ("starting_after", {"type": "integer"}, "`sequence_number` after which the events begin."),
    ),
    ("GET", "/v1/responses/{response}/input_items"): _PAGE,
    ("GET", "/v1/files"): (*_PAGE, ("purpose", {"type": "string"}, "List only files with this purpose.")),
    ("GET", "/v1/batches"): _PAGE,
}
"""The parameters in queries, by method and path. None is required."""


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the description of these routes."""
    schemas = _schemas()
    paths: dict[str, Any] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD", "OPTIONS"}):
            path = route.path.replace(":int}", "}")
            paths.setdefault(path, {})[method.lower()] = _operation(path, route.endpoint, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llamaq", "version": version("llamaq")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


@cache
def _schemas() -> dict[str, Any]:
    """Return the schemas of all bodies. Those that take job options have the properties of a job too."""
    models: list[type[BaseModel]] = [*dict.fromkeys(BODIES.values()), ErrorBody, MessageErrorBody, JobParams]
    _, top = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = top["$defs"]
    options = schemas["JobParams"]["properties"]
    for model in WITH_JOB_OPTIONS:
        left_out = () if model is ResponseRequest else DELAYS
        taken = {name: {**field} for name, field in options.items() if name not in left_out}
        schemas[model.__name__]["properties"] = taken | schemas[model.__name__]["properties"]
    return schemas


def _operation(path: str, endpoint: Callable[..., Any], method: str) -> dict[str, Any]:
    error = MessageErrorBody if path.startswith("/v1/messages") else ErrorBody
    operation: dict[str, Any] = {
        "summary": (inspect.getdoc(endpoint) or "").partition("\n")[0],
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {
            "200": {"description": "The answer."},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error.__name__}"}}},
            },
        },
    }
    if parameters := parameters_of(method, path):
        operation["parameters"] = parameters
    if path in BODIES and method == "POST":
        schema = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        kind = "multipart/form-data" if path in FORMS else "application/json"
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    return operation


def parameters_of(method: str, path: str) -> list[dict[str, Any]]:
    """Return the parameters of an operation in the form of OpenAPI."""
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": PATH.get(name, {"type": "string"})} for name in names
    ]
    in_query = [
        {"name": name, "in": "query", "schema": schema, "description": meaning}
        for name, schema, meaning in QUERY.get((method, path), ())
    ]
    return in_path + in_query
