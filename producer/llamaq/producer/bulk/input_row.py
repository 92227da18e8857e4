"""One row of the input: its request, or the reason why the row has no request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamaq.common.errors import InvalidRequest, LlamaqError
from llamaq.common.protocol.job_outcome import Result
from llamaq.producer.bulk.run_description import RESERVED_OPTIONS, Form, RunParameters
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.request_body import read_body


def row_key(run_id: str, number: int, index: int = 0) -> str:
    """Return the idempotency key of a job of a row: `RUN_ID:ROW`, for its further jobs `RUN_ID:ROW.INDEX`."""
    return f"{run_id}:{number}.{index}" if index else f"{run_id}:{number}"


@dataclass(slots=True)
class Row:
    """A row of the input."""

    number: int
    """Line number of the row in a JSONL file, number of the record in a table. The first has the number 1."""
    form: Form = "plain"
    """The form of the answer."""
    row_id: Any = None
    """The `custom_id` or `id` of the row. None: it has none."""
    endpoint: Endpoint = Endpoint.COMPLETIONS
    """The endpoint of the OpenAI API whose answer the row gets, in OpenAI's form."""
    model: str | None = None
    """The model that the row names. None: it names none."""
    jobs: Sequence[dict[str, Any]] = ()
    """The arguments of `submit` for each job of the row: a prompt, and job options."""
    n_choices: int = 1
    """Number of jobs for each prompt. The jobs of one prompt follow each other in `jobs`."""
    body_of: Callable[[Sequence[Result]], Awaitable[Any]] | None = None
    """Returns the body of the answer in OpenAI's form, or its JSON. None: it is a completion of `endpoint`."""
    error: LlamaqError | None = None
    """Why the row has no request. None: it has one."""


async def read_row(run: RunParameters, number: int, record: object) -> Row:
    """Return the row of a record. If the record is not a request, the row has the error.

    Args:
        run: The run.
        number: The number of the row.
        record: The decoded JSON of a line, or a record of a table.
    """
    row = Row(number, form=run.form_of("plain"), model=run.model)
    try:
        if not isinstance(record, Mapping):
            raise InvalidRequest("a JSON object is required")
        if "body" in record or "custom_id" in record:
            _read_batch_line(run, row, record)
        else:
            _read_plain_line(row, record)
        asked = {**run.options, **row.jobs[0]}
        for name in ("embed", "logprobs", "prompt_logprobs"):
            if row.form == "openai" and asked.get(name) is not None:
                raise InvalidRequest(f"{name}: the form openai has no place for it; leave it out, or use plain")
    except InvalidRequest as exc:
        row.error = exc
    return row


def unread_row(run: RunParameters, number: int, record: object, error: LlamaqError | None = None) -> Row:
    """Return a row without a request. It has the form and the id that the record asks for.

    Args:
        run: The run.
        number: The number of the row.
        record: The decoded JSON of a line, or a record of a table.
        error: Why the row has no request. None: the request is not read yet, or is not needed.
    """
    row = Row(number, form=run.form_of("plain"), model=run.model, error=error)
    if isinstance(record, Mapping):
        is_batch_line = "body" in record or "custom_id" in record
        row.form = run.form_of("openai" if is_batch_line else "plain")
        row.row_id = _id_in(record, "custom_id" if is_batch_line else "id")
    return row


def _id_in(record: Mapping[str, Any], name: str) -> str | int | None:
    """Return the id of a record. None: it has none, or another value that an output line cannot repeat."""
    row_id = record.get(name)
    return row_id if isinstance(row_id, str | int) and not isinstance(row_id, bool) else None


def _read_batch_line(run: RunParameters, row: Row, record: Mapping[str, Any]) -> None:
    """Read a line in the form of the OpenAI Batch API."""
    row.form, row.row_id = run.form_of("openai"), _id_in(record, "custom_id")
    if not isinstance(row.row_id, str) or not row.row_id:
        raise InvalidRequest("custom_id: a text is required")
    if record.get("method", "POST") != "POST":
        raise InvalidRequest("method: only POST is supported")
    url, body = record.get("url", run.endpoint), record.get("body")
    try:
        row.endpoint = Endpoint(url)
    except ValueError as exc:
        raise InvalidRequest(f"url: one of {', '.join(Endpoint)} is required") from exc
    if run.endpoint is not None and row.endpoint is not run.endpoint:
        raise InvalidRequest(f"url: this run accepts only {run.endpoint}")
    if not isinstance(body, Mapping):
        raise InvalidRequest("body: an object is required")
    asked = read_body(row.endpoint, body)
    if asked.is_echoed:
        raise InvalidRequest("echo: a bulk run does not support it; leave it out")
    row.jobs = [asked.only_job]
    row.model = run.model or asked.model


def _read_plain_line(row: Row, record: Mapping[str, Any]) -> None:
    """Read a flat line: an id, a prompt, and job options."""
    row.row_id = _id_in(record, "id")
    if row.row_id is None and record.get("id") is not None:
        raise InvalidRequest("id: a text or an integer is required")
    refused = sorted(name for name in RESERVED_OPTIONS & record.keys() if record[name] is not None)
    if refused:
        raise InvalidRequest(f"{refused[0]}: the run sets it for all rows")
    values = {name: value for name, value in record.items() if name != "id" and value is not None}
    row.jobs = [values]
    if "messages" in values:
        row.endpoint = Endpoint.CHAT
