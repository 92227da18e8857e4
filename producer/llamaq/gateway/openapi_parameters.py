"""The parameters in the paths and in the queries of requests, for the description of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Parameter = tuple[str, dict[str, Any], str]
"""Name, schema and meaning."""

FLAG = {"enum": ["true", "false", "1", "0"]}
_MODEL: Parameter = ("model", {"type": "string"}, "Name of the queue, or of the model that its workers serve.")
_PAGE: Sequence[Parameter] = (
    ("limit", {"type": "integer", "minimum": 1}, "Largest number of objects in the list."),
    ("after", {"type": "string"}, "The id of the last object of the page before."),
    ("order", {"enum": ["asc", "desc"]}, "`asc`: the oldest object is the first."),
)
PATH: Mapping[str, dict[str, Any]] = {"slot": {"type": "integer", "minimum": 0}}
"""Schemas of the parameters in paths. The others are texts."""
QUERY: Mapping[tuple[str, str], Sequence[Parameter]] = {
    ("GET", "/props"): (_MODEL,),
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
