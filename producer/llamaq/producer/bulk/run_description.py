"""The description of a bulk run, and its progress."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import AwareDatetime, Field, JsonValue, model_validator

from llamaq.common.protocol.job_request import JobParams, Priority
from llamaq.common.protocol.wire_model import StrictModel, WireModel
from llamaq.producer.bulk.compression import compression_of, uncompressed_path
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.option_synonyms import translate

RUN_ID_PATTERN = r"^[A-Za-z0-9_\-]{1,64}$"
MAX_WINDOW = 100_000

RESERVED_OPTIONS = frozenset({"cancel_on_disconnect", "idempotency_key", "priority", "stream"})
"""Job options that the run sets itself."""
_PROMPTS = frozenset({"messages", "prompt", "tokens"})

TABLE_SUFFIXES = frozenset({".csv", ".parquet"})

Form = Literal["openai", "plain"]
"""The form of an output line: that of the OpenAI Batch API, or a flat object."""


def new_run_id() -> str:
    """Return a new random run id."""
    return secrets.token_hex(6)


class RunParameters(StrictModel):
    """The parameters of a bulk run that do not depend on where its rows are stored."""

    run_id: str = Field(
        default_factory=new_run_id,
        pattern=RUN_ID_PATTERN,
        description="Name of the run: 1 to 64 letters, digits, `_` or `-`. The job of a row has the idempotency key "
        "`RUN_ID:ROW`.",
    )
    form: Form | None = Field(
        None,
        description="Form of the output lines: `openai` (Batch API) or `plain`. If not set: each row is answered in "
        "the form of its request.",
    )
    endpoint: Endpoint | None = Field(
        None, description="The only `url` that a line in the form of the Batch API may have. If not set: any."
    )
    model: str | None = Field(
        None, description="Name of the model in answers in OpenAI's form. If not set: the name in the request."
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="Job options of all rows. A row may override each of them."
    )
    priority: Priority = Field(Priority.BULK, description="Priority of the jobs.")
    window: int | None = Field(
        None,
        ge=1,
        le=MAX_WINDOW,
        description="Largest number of jobs in the queue. If not set: 4 for each slot of the queue's workers, at least "
        "256.",
    )
    max_errors: int | None = Field(
        None,
        ge=0,
        description="Stop when more rows than this have failed since the start or the last continuation. If not set: "
        "never.",
    )
    deadline: AwareDatetime | None = Field(
        None, description="Stop at this time. The run can be continued. If not set: never."
    )
    rate: float | None = Field(
        None, gt=0, le=10**6, description="Largest number of jobs submitted per second. If not set: no limit."
    )

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for name in self.options:
            if name in RESERVED_OPTIONS | _PROMPTS:
                raise ValueError(f"options: {name} cannot be set for all rows")
        JobParams.model_validate(translate(self.options))
        return self

    def form_of(self, form_of_request: Form) -> Form:
        """Return the form of the answer to a request in this form."""
        return self.form or form_of_request

    def row_parameters(self) -> dict[str, Any]:
        """Return the parameters that determine what a row computes and the form of its answer, as JSON values."""
        return self.model_dump(mode="json", include={"run_id", "form", "endpoint", "model", "options"})


def default_error_file(output: Path) -> Path:
    """Return the file of the rows that failed, if a run names none: for a run that has begun, the file that it has.

    A run that an older version began keeps its file: its description has no `errors`.
    """
    with suppress(OSError, ValueError, LookupError, TypeError):  # a new run, or a damaged description
        run = json.loads(description_file(output).read_bytes())["run"]
        if run["errors"] is None:
            return uncompressed_path(output).with_suffix(".errors.jsonl")
        if run["errors"] != run["output"] + ".errors.jsonl":  # otherwise it may have moved with the output
            return Path(run["errors"])
    return output.with_name(output.name + ".errors.jsonl")


def description_file(output: Path) -> Path:
    """Return the file that describes the run of an output file."""
    return output.with_name(output.name + ".run.json")


def rows_file(output: Path) -> Path:
    """Return the JSONL file that answers are appended to. A table or a compressed file is written from it at the end
    of the run.
    """
    is_appended = not is_table(output) and compression_of(output) is None
    return output if is_appended else output.with_name(output.name + ".rows.jsonl")


def is_table(output: Path) -> bool:
    """Return whether an output file is a table, judged by its name."""
    return uncompressed_path(output).suffix.lower() in TABLE_SUFFIXES


def _identity(path: Path) -> object:
    """Return a value that is equal for two paths of the same file, also through links and `..`."""
    try:
        found = path.stat()
    except OSError:  # a run that has not begun
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


class BulkRun(RunParameters):
    """A bulk run: its files and its parameters. It can be stored and sent as JSON.

    Executing the same description again continues the run.
    """

    input: Path = Field(
        description="File with one request in each row: .jsonl, .csv or .parquet; .gz or .zst may follow "
        ".jsonl and .csv."
    )
    output: Path = Field(
        description="File for the answers: .jsonl, .csv or .parquet; .gz or .zst may follow .jsonl and .csv."
    )
    errors: Path | None = Field(
        None,
        description="JSONL file for the rows that failed. If not set: that of a run that has begun, or "
        "`OUTPUT.errors.jsonl`.",
    )
    ordered: bool = Field(
        False, description="Bring the output into the order of the input, when all rows are computed."
    )

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        named = [_identity(path) for path in (self.input, self.output, self.error_file)]
        if len(set(named)) < len(named):
            raise ValueError("input, output and errors must be three different files")
        own = (description_file(self.output), rows_file(self.output))
        if taken := [path for path in own if _identity(path) in (named[0], named[2])]:
            raise ValueError(f"input, errors: the run itself writes {min(taken)}: name another file")
        if compression_of(self.error_file):
            raise ValueError("errors: this file cannot be compressed, because lines are appended to it")
        if self.form == "openai" and self.writes_table:
            raise ValueError("form: a table has plain answers: leave it out, or name a .jsonl file")
        return self

    @property
    def error_file(self) -> Path:
        """The file of the rows that failed."""
        return self.errors or default_error_file(self.output)

    @property
    def writes_table(self) -> bool:
        """Whether the output is a table, whose rows are plain answers."""
        return is_table(self.output)

    def form_of(self, form_of_request: Form) -> Form:
        """Return the form of the answer to a request in this form."""
        return "plain" if self.writes_table else super().form_of(form_of_request)


class BulkState(StrEnum):
    """The state of a bulk run."""

    RUNNING = "running"
    """Rows are computed."""
    COMPLETED = "completed"
    """All rows have an answer or an error."""
    STOPPED = "stopped"
    """The caller stopped the run. It can be continued."""
    DEADLINE = "deadline"
    """The run reached its `deadline`. It can be continued."""
    TOO_MANY_ERRORS = "too_many_errors"
    """More rows than `max_errors` have failed. The run can be continued."""


class BulkProgress(WireModel):
    """How far a bulk run is. Tokens and times are those of the process that executes it now."""

    run_id: str = Field(description="Name of the run.")
    state: BulkState = Field(BulkState.RUNNING, description="State of the run.")
    rows_total: int | None = Field(None, description="Number of rows of the input. None: not counted yet.")
    rows_done: int = Field(0, description="Number of rows that have an answer or an error.")
    rows_failed: int = Field(0, description="Number of rows that have an error.")
    rows_before: int = Field(0, description="Number of rows that earlier processes have done.")
    rows_in_flight: int = Field(0, description="Number of jobs in the queue.")
    last_row: int = Field(0, description="Highest row number that was read. Blank lines have numbers too.")
    prompt_tokens: int = Field(0, description="Number of tokens in the prompts.")
    cached_tokens: int = Field(0, description="Number of prompt tokens that were reused and not computed.")
    generated_tokens: int = Field(0, description="Number of generated tokens.")
    elapsed_s: float = Field(0.0, description="Time since the start of the process, in seconds.")
    tokens_per_s: float = Field(0.0, description="Tokens generated per second, lately.")
    eta_s: float | None = Field(None, description="Estimated time until the last row, in seconds. None: not known.")
    notice: str | None = Field(None, description="Why no job is submitted now. None: nothing is wrong.")

    @property
    def failure(self) -> str:
        """How many rows have failed, as a sentence."""
        return "1 row has failed" if self.rows_failed == 1 else f"{self.rows_failed} rows have failed"

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that were reused, from 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
