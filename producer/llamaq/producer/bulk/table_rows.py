"""The rows of a table: its columns, how a CSV file is split into rows, and what the cells of a row mean."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from typing import NoReturn, TextIO

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer.option_synonyms import SYNONYMS

JSON_COLUMNS = frozenset({
    "allowed_token_ids", "chat_template_kwargs", "json_schema", "logit_bias", "messages", "metadata", "stop_token_ids",
    "tokens", "tools",
})  # fmt: skip
"""Columns of a CSV file whose cells are JSON."""
LIST_COLUMNS = frozenset({"bad_words", "choice", "dry_sequence_breakers", "samplers", "stop"})
"""Columns of a CSV file whose cells are JSON if they begin with `[`, and otherwise one text."""
MAX_ROW_CHARS = 2**26
"""Longest row of a CSV file. It bounds the memory. Requests that are too large, but shorter, are refused one by one."""
TABLE_COLUMNS = frozenset({"id", *JobRequest.model_fields, *SYNONYMS})
"""The columns of a table that are read. Other columns are ignored."""
PROMPT_COLUMNS = ("prompt", "tokens", "messages", "embed")
"""A table has at least one of these columns."""
MAX_SHOWN_CHARS = 300
"""Longest list of columns in an error."""


class UnreadRow(InvalidRequest):
    """A row of a table that cannot be decoded, although its id is known.

    Attributes:
        row_id: The id of the row. None: it has none.
    """

    def __init__(self, message: str, row_id: str | None) -> None:
        super().__init__(message)
        self.row_id = row_id


def check_columns(names: Sequence[str]) -> None:
    """Check that the rows of a table can have requests, and that no column hides another.

    Raises:
        InvalidRequest: The columns are wrong. It is one of the `READ_ERRORS`, so the run is refused.
    """
    found = f"its columns are {', '.join(map(repr, names)):.{MAX_SHOWN_CHARS}}"
    double = [name for name in dict.fromkeys(names) if name in TABLE_COLUMNS and names.count(name) > 1]
    if double:
        raise InvalidRequest(f"the table has the column {double[0]} more than once; {found}")
    if not any(name in PROMPT_COLUMNS for name in names):
        raise InvalidRequest(f"the table has none of the columns {', '.join(PROMPT_COLUMNS)}; {found}")


def csv_rows(file: TextIO) -> Iterator[list[str]]:
    """Yield the rows of a CSV file that are not blank, the header too.

    Raises:
        csv.Error: A quote is not closed, or is not doubled within a cell. The rows behind it cannot be told apart. Or
            a row is longer than `MAX_ROW_CHARS`.
    """
    csv.field_size_limit(MAX_ROW_CHARS)
    lines = _BoundedLines(file)
    reader = csv.reader(lines, strict=True)
    while True:
        first_line, lines.n_chars = reader.line_num + 1, 0
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as exc:
            raise csv.Error(f"the row that begins at line {first_line}: {exc}: close or double its quotes") from exc
        if cells:
            yield cells


class _BoundedLines:
    """The lines of a CSV file. A row may have several lines, because a quoted cell may contain line breaks."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.n_chars = 0
        """Number of characters of the current row."""

    def __iter__(self) -> _BoundedLines:
        return self

    def __next__(self) -> str:
        line = self._file.readline(MAX_ROW_CHARS + 1 - self.n_chars)
        self.n_chars += len(line)
        if self.n_chars > MAX_ROW_CHARS:
            raise csv.Error(f"it is longer than {MAX_ROW_CHARS} characters")
        if not line:
            raise StopIteration
        return line


def decode_row(header: Sequence[str], cells: Sequence[str]) -> object:
    """Return the record of a row, or the decoding error. Missing cells at its end are empty."""
    if len(cells) > len(header):  # its id may be in a wrong column
        return InvalidRequest("the row has more cells than the header: quote cells that contain a comma")
    texts = dict(zip(header, cells, strict=False))
    try:
        return {name: _decode_cell(name, text) for name, text in texts.items() if name in TABLE_COLUMNS and text}
    except InvalidRequest as exc:
        return UnreadRow(str(exc), texts.get("id") or None)


def _decode_cell(name: str, text: str) -> object:
    """Return the value of a cell. Raises `InvalidRequest` if it must be JSON and is not."""
    if name not in JSON_COLUMNS and not (name in LIST_COLUMNS and text.startswith("[")):
        return text
    try:
        return decode_json(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"column {name}: not JSON: {exc}") from exc


def decode_json(text: str) -> object:
    """Return the decoded JSON. Raises `ValueError` also for NaN and Infinity, which are not JSON."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
