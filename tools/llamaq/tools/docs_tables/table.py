"""Renders a model's fields as a Markdown table, from the JSON schema of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from llamaq.common.protocol.sampling import SamplingDefaults, SamplingParams
from llamaq.common.protocol.wire_model import WireModel

Schema = Mapping[str, Any]

TYPES = {"integer": "int", "number": "float", "string": "str", "boolean": "bool"}
MIB = 1024 * 1024
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def render_table(model: type[BaseModel], fields: Sequence[str]) -> str:
    """Return the table, with a line break at its end.

    Fields that users set have the columns name, type, default, bounds and meaning. Fields that llamaq sets have the
    columns name, type and meaning.
    """
    schema = model.model_json_schema()
    is_output = issubclass(model, WireModel)
    header = ["name", "type", "meaning"] if is_output else ["name", "type", "default", "bounds", "meaning"]
    rows = []
    for name in fields:
        field = schema["properties"][name]
        is_required = name in schema.get("required", ())
        middle = [] if is_output else [render_default(model, name, field, is_required), _bounds(name, field, schema)]
        rows.append([f"`{name}`", _type(field, schema), *middle, field["description"]])
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def render_default(model: type[BaseModel], name: str, field: Schema, is_required: bool) -> str:
    """Return the text of the cell with the default of a field. Numbers are written as in a configuration file."""
    if is_required:
        return "required"
    if issubclass(model, SamplingParams) and name in SamplingDefaults.model_fields:
        return f"worker's: {_value(SamplingDefaults.model_fields[name].default)}"
    if "default" not in field:
        return "computed" if field.get("type") in TYPES else "empty"
    default = field["default"]
    if default is None:
        return "not set"
    if default in ("", [], {}):
        return "empty"
    if name.endswith("_bytes"):
        return _bytes(default)
    if isinstance(default, str):
        return f"`{default}`"
    return _value(default) if isinstance(default, list) else _value(default).replace(",", "")


def _variants(field: Schema, schema: Schema) -> list[Schema]:
    """Return the alternative schemas of a field, except the one for None. References are resolved."""
    variants = [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]
    return [schema["$defs"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one for one in variants]


def _type(field: Schema, schema: Schema) -> str:
    names = []
    for variant in _variants(field, schema):
        if "prefixItems" in variant:
            names.append(f"[{', '.join(_type(item, schema) for item in variant['prefixItems'])}]")
        elif variant.get("type") == "array":
            names.append("list of " + _type(variant.get("items", {}), schema))
        elif "base64" in variant.get("format", ""):
            names.append("bytes")
        elif "properties" in variant:
            names.append(f"`{variant['title']}`")
        else:
            names.append(TYPES.get(variant.get("type", ""), "map"))
    return " or ".join(names)


def _bounds(name: str, field: Schema, schema: Schema) -> str:
    show = _bytes if name.endswith("_bytes") else _value
    bounds = [_bounds_of(variant, show) for variant in _variants(field, schema)]
    return " or ".join(text for text in bounds if text)


def _bounds_of(variant: Schema, show: Callable[[Any], str]) -> str:
    if "const" in variant:
        return f"`{variant['const']}`"
    if "enum" in variant:
        return ", ".join(f"`{value}`" for value in variant["enum"])
    if (above := variant.get("exclusiveMinimum")) is not None:
        high = variant.get("maximum")
        return f"above {show(above)}" + (f", at most {show(high)}" if high is not None else "")
    for least, most, one, many in (
        ("minimum", "maximum", "", ""),
        ("minLength", "maxLength", " character", " characters"),
        ("minItems", "maxItems", " entry", " entries"),
        ("minProperties", "maxProperties", " entry", " entries"),
    ):
        low, high = variant.get(least), variant.get(most)
        numbers = [bound for bound in (low, high) if bound is not None]
        if not numbers:
            continue
        unit = one if numbers == [1] else many
        if low is None:
            return f"at most {show(high)}{unit}"
        return f"at least {show(low)}{unit}" if high is None else f"{show(low)} to {show(high)}{unit}"
    return ""


def _value(value: Any) -> str:
    """Return a number, a boolean or a list as text. Large numbers of the form 2^n - 1 are written as a power."""
    if isinstance(value, list | tuple):
        is_names = all(str(each).isidentifier() for each in value)
        return f"`{';'.join(value) if is_names else json.dumps(value)}`"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value >= 2**31 - 1 and (value + 1).bit_count() == 1:
        exponent = str(value.bit_length()).translate(SUPERSCRIPTS)
        return f"2{exponent} - 1"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _bytes(value: int) -> str:
    return f"{value // MIB} MiB" if value % MIB == 0 else f"{value // 1024} KiB"
