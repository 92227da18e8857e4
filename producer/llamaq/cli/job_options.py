"""The options of a job, generated from the fields of `JobParams`, and hints for options of other programs."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from llamaq.cli.generated_options import option, spelling, with_options
from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_request import JobParams, Priority
from llamaq.common.protocol.sampling import SamplingParams
from llamaq.producer.option_synonyms import HINTS, SYNONYMS

_JSON = ("json_schema", "logit_bias", "lora", "metadata", "tools", "chat_template_kwargs")
_LISTS = {
    "stop": list[str],
    "dry_sequence_breakers": list[str],
    "choice": list[str],
    "bad_words": list[str],
    "stop_token_ids": list[int],
    "allowed_token_ids": list[int],
}
"""The types of the options that may be given several times."""
_FORMS = dict.fromkeys(_LISTS, "May be given several times.") | {
    "grammar": "The grammar itself, or @FILE.",
    "regex": "The expression itself, or @FILE.",
    "lark": "The grammar itself, or @FILE.",
    "json_schema": "JSON, or @FILE.",
    "run_at": "Such as 2030-12-24T18:00+01:00.",
    "logit_bias": 'JSON, such as {"TOKEN": BIAS}, or @FILE.',
    "lora": 'JSON, such as {"ADAPTER": SCALE}, or @FILE.',
    "metadata": "JSON, or @FILE.",
    "tools": "JSON, or @FILE.",
    "chat_template_kwargs": "JSON, or @FILE.",
}
"""For each parameter that is not a single value: how its value is written on the command line."""


def with_job_options(command: Callable[..., None], *, without: tuple[str, ...] = ()) -> Callable[..., None]:
    """Return the command with one option for each field of `JobParams`, except the fields in `without`.

    Its parameter `options` receives the values of the given options.
    """
    return with_options(command, job_options(without), into="options", read=read_job_options)


def job_options(without: Collection[str] = ()) -> list[inspect.Parameter]:
    """Return the parameters of one option for each field of `JobParams`, except the fields in `without`."""
    names = [name for name in JobParams.model_fields if name not in without]
    return [option(name, _option_type(name), help_text=_help(name), panel="Job") for name in names]


def _help(name: str) -> str:
    """Return the description of a parameter, with its form on the command line and its default."""
    field = JobParams.model_fields[name]
    default: object = "set by the worker" if name in SamplingParams.model_fields else field.default
    if isinstance(default, bool):
        default = "yes" if default else "no"
    is_shown = default not in (None, "", (), PydanticUndefined)
    parts = [field.description, _FORMS.get(name), f"(default {default})" if is_shown else None]
    return " ".join(part for part in parts if part)


def _option_type(name: str) -> Any:
    """Return the type that the option is parsed as. Pydantic checks the value later."""
    if name in _LISTS:
        return _LISTS[name]
    if name == "run_at":
        return str
    annotation = JobParams.model_fields[name].annotation
    while get_origin(annotation) in (UnionType, Annotated) or get_args(annotation):
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    return annotation if annotation in (int, float, bool, Priority) and name not in _JSON else str


def read_job_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the given options, with files read and JSON decoded.

    Raises:
        InvalidRequest: A file cannot be read, or its text is not JSON.
    """
    given = {name: value for name, value in values.items() if value is not None and value != []}
    for name in ("grammar", "regex", "lark", *_JSON):
        if name in given:
            given[name] = _read_text(name, given[name])
    for name in _JSON:
        if name in given:
            try:
                given[name] = json.loads(given[name])
            except (ValueError, RecursionError) as exc:
                raise InvalidRequest(f"{spelling(name)}: not JSON: {exc}") from exc
    return given


def _read_text(name: str, value: str) -> str:
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"{spelling(name)}: {exc}") from exc


def add_hint(error: Exception) -> None:
    """Add what to use instead to the error for an unknown option that other programs have. Other errors do not change.

    The class of the error is in a private module of typer. Therefore the error is recognized by its attributes.
    """
    written, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if written is None or context is None:
        return
    known = {parameter.name for parameter in context.command.params}
    name = written.lstrip("-").replace("-", "_")
    meant = SYNONYMS.get(name)
    if meant is not None and meant in known:
        error.possibilities = [spelling(meant)]  # type: ignore[attr-defined]
    elif name in HINTS and "max_tokens" in known:
        fields = "|".join(JobParams.model_fields)
        hint = re.sub(rf"\b({fields})\b", lambda match: spelling(match[1]), HINTS[name])
        error.message, error.possibilities = f"No such option: {written}; {hint}", None  # type: ignore[attr-defined]
