"""Rewrites keywords for object properties that llguidance lacks into keywords that it has."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llamaq.common.json_schema.formats import NARROWER, PATTERNS
from llamaq.common.json_schema.references import References, Schema, refused

DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
NAME_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "uuid": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
        "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
        "ipv6": "^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
        "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,7}}$",
        "email": rf"^[a-z0-9_+-]{{1,30}}(\.[a-z0-9_+-]{{1,30}})?@{_LABEL}(\.{_LABEL}){{1,7}}$",
        "uri": rf"^https?://{_LABEL}(\.{_LABEL}){{0,7}}(/[A-Za-z0-9._~-]*)*$",
        "duration": "^P([0-9]{1,6}D(T[0-9]{1,6}[HMS])?|T[0-9]{1,6}[HMS])$",
        **PATTERNS,
    }
)
"""Maps each format to a regular expression whose strings have the format. llguidance has formats of values only."""
_SIZES = ("minProperties", "maxProperties")
MAX_OPTIONAL = 32
"""Upper bound on the optional properties of an object whose properties are counted. Each of them is an alternative."""
_ANY_NAME = r"^[^\x00-\x1f]*$"
_ANNOTATIONS = frozenset({"type", "title", "description", "examples", "default", "$comment"})


def rewrite_dependencies(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without the keywords that depend on whether a property exists.

    Each of these keywords becomes two cases: the property is missing, or the property exists and the value matches the
    schema of the keyword.
    """
    cases = [
        {"anyOf": [{"properties": {name: False}}, _with_property(name, value)]}
        for keyword in DEPENDENCIES
        if isinstance(schema.get(keyword), dict)
        for name, value in schema[keyword].items()
    ]
    if not cases:
        return schema
    rest = {key: value for key, value in schema.items() if key not in DEPENDENCIES}
    earlier = rest.get("allOf")
    return {**rest, "allOf": [*(earlier if isinstance(earlier, list) else []), *cases]}


def _with_property(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"required": [name, *(other for other in value if other != name)]}
    return {"allOf": [{"required": [name]}, value]}


def rewrite_property_names(schema: dict[str, Any], references: References) -> dict[str, Any]:
    """Return a schema that names its properties or has a pattern for them, in place of `propertyNames` if possible."""
    if "propertyNames" not in schema or schema.get("patternProperties"):
        return schema
    names = schema["propertyNames"]
    if isinstance(names, dict) and "$ref" in names:
        is_alone = names.keys() <= {"$ref", *_ANNOTATIONS} and names.get("type", "string") == "string"
        if not (is_alone or references.refs_stand_alone):
            return schema
        names = references.resolve(names["$ref"])
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    if names is True:
        return rest
    if not isinstance(names, dict):
        return schema
    types = names.get("type", "string")
    if not isinstance(types, str | list) or "string" not in types:
        return schema
    limits = {key: value for key, value in names.items() if key not in _ANNOTATIONS}
    if not limits:
        return rest
    known = schema.get("properties")
    known = known if isinstance(known, dict) else {}
    other: Schema = schema.get("additionalProperties", {})
    allowed = _allowed_names(limits)
    if allowed:
        return {**rest, "properties": {name: known.get(name, other) for name in allowed}, "additionalProperties": False}
    pattern = _name_pattern(limits)
    if known or pattern is None:
        return schema
    return {**rest, "patternProperties": {pattern: other}, "additionalProperties": False}


def _allowed_names(names: dict[str, Any]) -> list[str]:
    """Return the names that `const` or `enum` list. Empty: another keyword limits the names too."""
    values = [names["const"]] if names.keys() == {"const"} else names.get("enum")
    is_alone = names.keys() in ({"const"}, {"enum"}) and isinstance(values, list)
    return [value for value in values or () if isinstance(value, str)] if is_alone else []


def _name_pattern(names: dict[str, Any]) -> str | None:
    """Return a regular expression for names that one keyword or their length describes, or None."""
    if names.keys() == {"pattern"} and isinstance(names["pattern"], str):
        return str(names["pattern"])
    if names.keys() == {"format"}:
        return _format_pattern(names["format"])
    lengths = {key: int(value) for key, value in names.items() if isinstance(value, int | float) and value % 1 == 0}
    if lengths.keys() == names.keys() <= {"minLength", "maxLength"}:
        return f"^[^\\x00-\\x1f]{{{lengths.get('minLength', 0)},{lengths.get('maxLength', '')}}}$"
    return None


def _format_pattern(name: Any) -> str | None:
    """Return a regular expression for names of a format. A format that the standard does not define allows each
    name.
    """
    if not isinstance(name, str):
        return None
    return NAME_FORMATS.get(NARROWER.get(name, name), _ANY_NAME)


def rewrite_sizes(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a schema whose `minProperties` and `maxProperties` a grammar can enforce.

    llguidance counts properties only where all named ones are required, or at least one of the others in a closed
    object. Elsewhere, the schema gets alternatives: each requires another property, and excludes further ones if their
    number is limited. A grammar cannot remember keys that the schema does not name, so an output could have such a key
    twice.

    Raises:
        ValueError: The number of properties cannot be enforced.
    """
    required = schema.get("required", [])
    if schema.keys().isdisjoint(_SIZES) or not _is_list_of_names(required):
        return schema
    if any(name in schema and _size(schema, name) is None for name in _SIZES):
        return schema  # llguidance refuses the value
    optional = _optional_names(schema, required)
    n_required, is_closed = len(set(required)), _is_closed(schema)
    n_missing = max(0, (_size(schema, "minProperties") or 0) - n_required)
    most = _size(schema, "maxProperties")
    n_more = None if most is None or (is_closed and most >= n_required + len(optional)) else most - n_required
    if n_missing > 1 and not (is_closed and n_missing >= len(optional)):
        reason = f"is not supported above {n_required + 1}, because a key may occur twice"
        raise refused("minProperties", place, f"{reason}: name the properties, and require them")
    if not optional or (is_closed and n_missing == 1 and most is None):
        return schema
    if n_more is not None and n_more > 1:
        reason = f"is not supported above {n_required + 1} where properties are optional"
        raise refused("maxProperties", place, f"{reason}: remove it and check the result")
    if len(optional) > MAX_OPTIONAL and (n_missing or n_more is not None):
        keyword = "minProperties" if n_more is None else "maxProperties"
        raise refused(keyword, place, f"is not supported with more than {MAX_OPTIONAL} optional properties")
    rest = {key: value for key, value in schema.items() if key not in _SIZES}
    cases = _cases_of_size(required, optional, n_missing, n_more)
    earlier = rest.get("allOf")
    return {**rest, "allOf": [*(earlier if isinstance(earlier, list) else []), {"anyOf": cases}]} if cases else rest


def _cases_of_size(required: list[str], optional: list[str], n_missing: int, n_more: int | None) -> list[Schema]:
    """Return alternatives that have at least `n_missing` and at most `n_more` of the optional properties.

    Without a bound, the list is empty. The caller has checked that `n_missing` is at most 1, or that no object has
    more than `n_missing` optional properties, so that an object must have all of them.
    """
    if n_missing > len(optional) or (n_more is not None and n_more < n_missing):
        return [False]
    if n_missing > 1:
        return [{"required": optional}]
    if n_more is None:
        return [{"required": [name]} for name in optional] if n_missing else []
    one = [_exactly(required, optional, [name]) for name in optional] if n_more else []
    return one if n_missing else [*one, _exactly(required, optional, [])]


def _exactly(required: list[str], optional: list[str], names: list[str]) -> dict[str, Any]:
    """Return a schema of objects with the required properties and these ones of the optional properties only."""
    allowed = dict.fromkeys((*required, *names), True) | {name: False for name in optional if name not in names}
    return {"properties": allowed, "required": names, "additionalProperties": False}


def _is_closed(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _optional_names(schema: dict[str, Any], required: list[str]) -> list[str]:
    properties = schema.get("properties")
    named = properties.items() if isinstance(properties, dict) else ()
    return [name for name, value in named if value is not False and name not in required]


def _size(schema: dict[str, Any], name: str) -> int | None:
    value = schema.get(name)
    return value if type(value) is int else None
