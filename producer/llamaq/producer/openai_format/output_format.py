"""Reads how a request constrains its output: the forms of OpenAI, llama-server, vLLM and TGI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_request import JobRequest

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of `json_object`."""
GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Fields of older versions of vLLM, and the options that they mean."""


def read_constraint(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job options that constrain the output.

    Raises:
        InvalidRequest: A field has a form that is not supported, or there are several constraints.
    """
    found = [
        _read_response_format(body.get("response_format")),
        _read_structured_outputs(body.get("structured_outputs")),
        {name: body[name] for name in ("grammar", "json_schema") if body.get(name)},
        {ours: body[name] for name, ours in GUIDED.items() if body.get(name)},
    ]
    given = [each for each in found if each]
    if sum(len(each) for each in given) > 1:
        raise InvalidRequest(
            "response_format: give one of response_format, structured_outputs, json_schema, grammar and guided_*, and "
            "no other"
        )
    constraint = given[0] if given else {}
    if not isinstance(constraint.get("json_schema", {}), Mapping):
        raise InvalidRequest("json_schema: an object is required")
    return constraint


def _read_response_format(value: Any) -> dict[str, Any]:
    match value:
        case None | {"type": "text"}:
            return {}
        case Mapping() if not value:  # as in llama-server
            return {}
        case {"type": "json_object" | "json_schema", "schema": Mapping() as schema}:  # llama-server
            return {"json_schema": dict(schema)}
        case {"type": "json" | "json_object", "value": Mapping() as schema}:  # TGI, and thereby huggingface_hub
            return {"json_schema": dict(schema)}
        case {"type": "json_schema", "value": {"schema": Mapping() as schema}}:
            return {"json_schema": dict(schema)}
        case {"type": "regex", "value": str(regex)}:
            return {"regex": regex}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return {"json_schema": dict(schema)}
        case {"type": "json_object"}:
            return {"json_schema": ANY_OBJECT}
    raise InvalidRequest("response_format: the type must be text, json_object, regex, or json_schema with a schema")


def _read_structured_outputs(value: Any) -> dict[str, Any]:
    """Return the option that vLLM's `structured_outputs` means. Its fields have our names, except `json`."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest("structured_outputs: an object is required")
    options = {}
    for name, constraint in value.items():
        ours = "json_schema" if name == "json" else name
        if constraint is None or constraint is False:
            continue
        if ours not in JobRequest.model_fields or name not in ("json", "grammar", "regex", "choice"):
            raise InvalidRequest(f"structured_outputs.{str(name)[:50]}: llamaq does not support it")
        options[ours] = constraint
    return options
