"""The base classes of all messages that travel through Redis.

pydantic collects an error for each invalid part: gigabytes for 4 MiB of them. So the validation of what users write
ends early, here and by `fail_fast`.
"""

from __future__ import annotations

from math import isfinite
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue, ValidationError, model_validator

from llamaq.common.errors import InvalidRequest

MAX_FIELDS = 128
MAX_PARTS = 200_000
MAX_JSON_DEPTH = 200
NO_NUMBER = "a number is required, not a boolean"
SCALARS = frozenset({str, int, bool, type(None)})


def refuse_boolean(value: Any) -> Any:
    """Return a value. Raises `ValueError` if it is a boolean, which pydantic takes for the number 0 or 1."""
    if value is True or value is False:
        raise ValueError(NO_NUMBER)
    return value


class StrictModel(BaseModel):
    """A message that users write. Mistakes that pydantic would ignore are errors.

    An unknown field is an error, so that a misspelt parameter is noticed, and so is a boolean for a number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    _numbers: ClassVar[frozenset[str]] = frozenset()
    """The fields that are numbers."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._numbers = frozenset(name for name, field in cls.model_fields.items() if _is_number(field.annotation))

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_FIELDS:
            raise ValueError(f"{len(values)} fields are more than there are")
        if booleans := [name for name in values if name in cls._numbers and isinstance(values[name], bool)]:
            raise _invalid((booleans[0],), NO_NUMBER)
        return values


def _is_number(annotation: Any) -> bool:
    """Return whether a type is a number, or a union with numbers but without `bool`."""
    types = _alternatives(annotation)
    return bool not in types and not {int, float}.isdisjoint(types)


def _alternatives(annotation: Any) -> set[Any]:
    """Return the types of a union, or the only type."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {each for part in get_args(annotation) for each in _alternatives(part)}
    return {annotation}


def _invalid(path: tuple[str | int, ...], problem: str) -> ValidationError:
    """Return the error of the part of a value at a path."""
    error: Any = {"type": "value_error", "loc": path, "input": 0, "ctx": {"error": problem}}
    return ValidationError.from_exception_data("", [error])


class WireModel(BaseModel):
    """A message that llamaq writes: an unknown field is ignored, because a newer version may have added it."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


def parts_of(value: Any) -> list[Any]:
    """Return a value and all its parts. Raises `InvalidRequest` if there are more than `MAX_PARTS`.

    A list or tuple of scalars counts as one.
    """
    parts = [value]
    for part in parts:  # the loop appends the parts of each part
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list | tuple) and not SCALARS.issuperset(map(type, part)):
            parts += part
        elif isinstance(part, BaseModel):
            parts += [getattr(part, name) for name in part.model_fields_set]
        if len(parts) > MAX_PARTS:
            raise InvalidRequest(f"the request has more than {MAX_PARTS:,} parts")
    return parts


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
        raise _invalid(path, problem)
    for key, entry in entries:
        _check_json(entry, (*path, key))
    return part


JsonObject = Annotated[dict[str, JsonValue], BeforeValidator(_check_json)]
"""A JSON object."""
