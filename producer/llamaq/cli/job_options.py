"""Command-line options: those of many commands, and those made from `JobParams`, so that a parameter stands once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin

import typer

from llamaq.cli.generated_options import flag, with_flags
from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_request import JobParams, Priority

RedisUrl = Annotated[
    str | None, typer.Option(help="where Redis is [env: LLAMAQ_REDIS_URL] [default: redis://localhost:6379/0]")
]
Queue = Annotated[str | None, typer.Option(help="name of the queue [env: LLAMAQ_QUEUE] [default: default]")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]

_JSON = ("json_schema", "logit_bias", "metadata")
_HELP = {
    "max_tokens": "generate at most this many tokens [default: 256]",
    "temperature": "0 is greedy",
    "top_k": "keep the k most probable tokens, 0: all",
    "top_p": "keep the smallest set with this probability, 1: off",
    "min_p": "drop tokens below this share of the best, 0: off",
    "typical_p": "locally typical sampling, 1: off",
    "repeat_penalty": "1: off",
    "frequency_penalty": "0: off",
    "presence_penalty": "0: off",
    "penalty_last_n": "tokens that the penalties look at, -1: all",
    "seed": "drawn when missing",
    "stop": "end before this text; may be given several times",
    "grammar": "GBNF, or @FILE",
    "grammar_root": "first rule of the grammar [default: root]",
    "json_schema": "JSON, or @FILE",
    "logit_bias": 'JSON, as {"TOKEN": BIAS}',
    "metadata": "JSON, kept and returned",
    "ignore_eos": "go on to --max-tokens",
    "cache_prompt": "share the prompt's KV cells [default: yes]",
    "cache_salt": "share them only with jobs of this salt",
    "cache_public": "so many tokens of the prompt, or 'system' for its system messages, are no secret",
    "slot": "run in this slot and no other",
    "timeout_s": "end the job after running this long",
    "queue_timeout_s": "end the job after waiting this long",
    "stream": "per-token events [default: yes]",
    "cancel_on_disconnect": "cancel when nobody listens",
    "idempotency_key": "the same key gives the same job",
}


def with_job_options(command: Callable[..., None], *, without: tuple[str, ...] = ()) -> Callable[..., None]:
    """Give the command one option for each field of `JobParams`; it gets those that were set as `options`."""
    names = [name for name in JobParams.model_fields if name not in without]
    flags = [flag(name, _flag_type(name), help_text=_HELP.get(name), panel="Job") for name in names]
    return with_flags(command, flags, into="options", read=_read)


def _flag_type(name: str) -> Any:
    """What the option is read as; pydantic checks the value."""
    if name == "stop":
        return list[str]
    annotation = JobParams.model_fields[name].annotation
    while get_origin(annotation) in (UnionType, Annotated) or get_args(annotation):
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    return annotation if annotation in (int, float, bool, Priority) and name not in _JSON else str


def _read(values: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, with files read and JSON decoded. Raises `InvalidRequest`."""
    given = {name: value for name, value in values.items() if value is not None and value != []}
    for name in ("grammar", *_JSON):
        if name in given:
            given[name] = _read_text(name, given[name])
    for name in _JSON:
        if name in given:
            try:
                given[name] = json.loads(given[name])
            except (ValueError, RecursionError) as exc:
                raise InvalidRequest(f"--{name.replace('_', '-')}: not JSON: {exc}") from exc
    return given


def _read_text(name: str, value: str) -> str:
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"--{name.replace('_', '-')}: {exc}") from exc
