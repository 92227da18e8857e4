"""The base classes of all messages that travel through Redis.

pydantic collects an error for each invalid part of a value: for 4 MiB of them, gigabytes within minutes. So the
validation of what users write ends early, here and by `fail_fast`.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue, ValidationError, model_validator

MAX_FIELDS = 128
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


def _check_json(value: Any) -> Any:
    _check_part(value, ())
    return value


def _check_part(part: Any, path: tuple[str | int, ...]) -> None:
    """Raise `ValidationError` at the first place that is not JSON. `path` leads to the part."""
    entries: Any = ()
    if isinstance(part, dict):
        is_json = all(isinstance(key, str) for key in part)
        entries = part.items()
    elif isinstance(part, list | tuple):
        is_json = True
        entries = () if SCALARS.issuperset(map(type, part)) else enumerate(part)
    else:
        is_json = part is None or isinstance(part, str | int) or (isinstance(part, float) and isfinite(part))
    if not is_json or len(path) > MAX_JSON_DEPTH:
        context = {"error": "a key, a value or the depth is not allowed"}
        raise ValidationError.from_exception_data(
            "", [{"type": "json_invalid", "loc": path, "input": 0, "ctx": context}]
        )
    for key, entry in entries:
        _check_part(entry, (*path, key))


JsonObject = Annotated[dict[str, JsonValue], BeforeValidator(_check_json)]
"""A JSON object."""
