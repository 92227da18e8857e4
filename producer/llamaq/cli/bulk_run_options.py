"""The options of a bulk run, generated from the fields of `BulkRun` and `JobParams`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llamaq.cli.generated_options import option, with_options
from llamaq.cli.job_options import job_options, read_job_options
from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import Priority
from llamaq.producer.bulk import BulkRun, run_id_of
from llamaq.producer.bulk.run_description import RESERVED_OPTIONS
from llamaq.producer.bulk.spooled_input import spool, spooled_file

_TYPES: dict[str, Any] = {
    "deadline": str,
    "errors": Path,
    "form": Literal["openai", "plain"],
    "max_errors": int,
    "model": str,
    "ordered": bool,
    "priority": Priority,
    "rate": float,
    "run_id": str,
    "window": int,
}
"""For each field of `BulkRun` that is an option: the type that the option is parsed as."""
_FORMS = {
    "deadline": "Such as 2030-12-24T18:00+01:00, or the time from now on: 90s, 30m, 8h, 2d.",
    "run_id": "(default: that of the output file if it is of a run, otherwise a random id)",
    "priority": "(default bulk)",
}
STANDARD_STREAM = Path("-")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the arguments and options of a bulk run. Its parameter `run` receives the `BulkRun`."""
    generated = [_input_argument(), _output_option()]
    generated += [option(name, _TYPES[name], help_text=_help(name), panel="Run") for name in _TYPES]
    generated += job_options(without=RESERVED_OPTIONS)
    return with_options(command, generated, into="run", read=_read)


def read_time(text: str, now: datetime) -> datetime:
    """Return the time that a text names: a time in the form of ISO 8601, or a duration from `now` on.

    Raises:
        InvalidRequest: It is neither, or the time is not between the years 1 and 9999 in UTC.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", text.strip())
    try:
        if found is not None:
            return now + timedelta(seconds=float(found[1]) * _UNITS[found[2]])
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        raise InvalidRequest(f"{text[:40]!r} is not a time such as 2030-12-24T18:00+01:00, 90s, 30m or 8h") from exc


def _help(name: str) -> str:
    return " ".join(filter(None, [BulkRun.model_fields[name].description, _FORMS.get(name)]))


def _input_argument() -> inspect.Parameter:
    text = f"{_help('input')} `-`: JSONL rows of standard input."
    argument = typer.Argument(metavar="INPUT", help=text, show_default=False)
    return inspect.Parameter("input_file", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[Path, argument])


def _output_option() -> inspect.Parameter:
    spelling = typer.Option("--output", "-o", help=BulkRun.model_fields["output"].description, rich_help_panel="Run")
    return inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[Path, spelling])


def _read(values: dict[str, Any]) -> Any:
    """Return the run of the given options. If its input is standard input, the rows are stored in a file first.

    Raises:
        InvalidRequest: An option is not valid.
        BulkRunRefused: The output belongs to a run whose description is damaged. Or the rows of standard input cannot
            be stored.
    """
    if values["output"] == STANDARD_STREAM:
        raise InvalidRequest("output: a run is continued from its output, so name a file, such as -o answers.jsonl")
    is_spooled = values["input_file"] == STANDARD_STREAM
    if is_spooled:
        values["input_file"] = spooled_file(values["output"])
    fields = {name: values.pop(name) for name in list(values) if name in _TYPES and values[name] is not None}
    fields |= {"input": values.pop("input_file").absolute(), "output": values.pop("output").absolute()}
    if "deadline" in fields:
        fields["deadline"] = read_time(fields["deadline"], datetime.now(UTC))
    if "errors" in fields:
        fields["errors"] = fields["errors"].absolute()
    if "run_id" not in fields and (known := run_id_of(fields["output"])) is not None:
        fields["run_id"] = known
    fields["options"] = read_job_options({name: value for name, value in values.items() if name not in _TYPES})
    run = codec.build_model(BulkRun, fields)
    if is_spooled:
        if sys.stdin is None or sys.stdin.isatty():
            raise InvalidRequest("input: standard input has no rows: name a file, or use a pipe")
        spool(sys.stdin.buffer, run)
    return run
