"""The base classes of all messages that travel through Redis.

pydantic collects an error for each invalid part: gigabytes for 4 MiB of them. So the validation of what users write
ends early, here and by `fail_fast`.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue, ValidationError, model_validator

from llamaq.common.errors import InvalidRequest

MAX_FIELDS = 128
MAX_PARTS = 200_000
MAX_JSON_DEPTH = 200
SCALARS = frozenset({str, int, bool, type(None)})


class StrictModel(BaseModel):
    """A message that users write: an unknown field is an error, so that a misspelt parameter is noticed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_n_fields(cls, values: Any) -> Any:
        if isinstance(values, dict) and len(values) > MAX_FIELDS:
            raise ValueError(f"{len(values)} fields are more than there are")
        return values


class WireModel(BaseModel):
    """A message that llamaq writes: an unknown field is ignored, because a newer version may have added it."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


def check_n_parts(value: Any) -> None:
    """Raise `InvalidRequest` if a value has more than `MAX_PARTS` parts. A list of scalars counts as one."""
    parts = [value]
    for part in parts:  # the loop appends the parts of each part
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list) and not SCALARS.issuperset(map(type, part)):
            parts += part
        if len(parts) > MAX_PARTS:
            raise InvalidRequest(f"the request has more than {MAX_PARTS:,} parts")


def _check_json(part: Any, path: tuple[str | int, ...] = ()) -> Any:
    """Return a JSON value. Raises `ValidationError` at its first part that is not JSON, and names the path to it."""
    entries: Any = ()
    problem = ""
    if len(path) > MAX_JSON_DEPTH:
        problem = f"it is nested deeper than {MAX_JSON_DEPTH} levels"
    elif isinstance(part, dict):
        entries = part.items()
        if not all(isinstance(key, str) for key in part):
            problem = "a key is no text"
    elif isinstance(part, list):
        entries = () if SCALARS.issuperset(map(type, part)) else enumerate(part)
    elif not isinstance(part, str | int | None) and not (isinstance(part, float) and isfinite(part)):
        problem = f"JSON has no {part if isinstance(part, float) else type(part).__name__}"
    if problem:
        error: Any = {"type": "value_error", "loc": path, "input": 0, "ctx": {"error": problem}}
        raise ValidationError.from_exception_data("", [error])
    for key, entry in entries:
        _check_json(entry, (*path, key))
    return part


JsonObject = Annotated[dict[str, JsonValue], BeforeValidator(_check_json)]
"""A JSON object."""
