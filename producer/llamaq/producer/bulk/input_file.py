"""Reads the rows of an input file, one after the other, and fingerprints the file."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from llamaq.common.errors import BulkRunRefused, InvalidRequest
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer.bulk.compression import compression_in, compression_of, decompressed, uncompressed_path
from llamaq.producer.bulk.described_file import (
    READ_BYTES,
    DigestedBytes,
    Fingerprint,
    InputChanged,
    open_described,
)
from llamaq.producer.bulk.pyarrow_import import pyarrow_module
from llamaq.producer.option_synonyms import SYNONYMS

READ_ERRORS = (OSError, ValueError, csv.Error)
"""Errors of a file that cannot be read. Those of pyarrow are among them."""
ROWS_PER_YIELD = 50
"""After this many rows of the input, other tasks of the event loop run."""
PARQUET_ROWS_AT_ONCE = 16
"""Rows that are decoded at once. Each may be as large as the largest request, also in a file of a few bytes."""
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

Record = tuple[int, object]
"""A row number, and the record: a decoded JSON value, the decoding error, or `SKIPPED`."""
SKIPPED = object()
"""The record of a finished row or of a blank line."""


class UnreadRow(InvalidRequest):
    """A row of a table that cannot be decoded, although its id is known.

    Attributes:
        row_id: The id of the row. None: it has none.
    """

    def __init__(self, message: str, row_id: str | None) -> None:
        super().__init__(message)
        self.row_id = row_id


class FinishedRows:
    """The rows of a run that have an answer or an error, with one bit for each row. A million rows take 125 KB."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<FinishedRows {self._count}>"

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and bool(self._bits[place] & (1 << (number & 7)))

    def add(self, number: int) -> None:
        """Add a row."""
        if number in self:
            return
        place = number >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1 - len(self._bits)))
        self._bits[place] |= 1 << (number & 7)
        self._count += 1


def file_format(path: Path) -> str:
    """Return the format of the content of a file: `jsonl`, `csv` or `parquet`.

    Raises:
        BulkRunRefused: The file has another suffix, or is a compressed Parquet file.
    """
    formats = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
    found = formats.get(uncompressed_path(path).suffix.lower())
    if found is None or (found == "parquet" and compression_of(path)):
        raise BulkRunRefused(
            f"{path}: the name of the file must end with .jsonl, .csv or .parquet; .gz or .zst may follow .jsonl and "
            ".csv"
        )
    return found


def do_nothing() -> None:
    """Do nothing."""


def take_fingerprint(path: Path, check: Callable[[], object] = do_nothing) -> Fingerprint:
    """Read the whole file and return its fingerprint.

    Args:
        path: The file.
        check: Called for each row. It may raise an error to end the read.

    Raises:
        OSError: The file cannot be read.
    """
    compression, mtime_ns = compression_of(path), path.stat().st_mtime_ns
    with path.open("rb", buffering=0) as file:
        digested = DigestedBytes(file)
        with decompressed(digested, compression, READ_BYTES) as content:
            if file_format(path) != "parquet":
                _check_is_text(content.peek(), path)
            n_rows, n_content_bytes = _count_lines(content, check)
    if file_format(path) != "jsonl":
        n_rows = _count_records(path, check)
    return Fingerprint(
        n_bytes=digested.n_bytes,
        mtime_ns=mtime_ns,
        sha256=digested.sha256,
        n_rows=n_rows,
        n_content_bytes=None if compression is None else n_content_bytes,
    )


def _check_is_text(start: bytes, path: Path) -> None:
    """Check that the content of a file is not compressed, judged by its first bytes.

    Raises:
        InvalidRequest: It is compressed, or the name of the file says so and the file is empty.
    """
    if compression_of(path) is not None and not path.stat().st_size:
        raise InvalidRequest("it is empty, which no compressed file is")
    if found := compression_in(start):
        raise InvalidRequest(f"its content is compressed, so its name must end with {found}")


def _count_lines(content: BinaryIO, check: Callable[[], object]) -> tuple[int, int]:
    """Return the number of lines that are not blank, and the number of bytes."""
    n_rows, n_bytes, is_blank = 0, 0, True
    while part := content.readline(READ_BYTES):  # a long line has several parts
        check()
        n_bytes += len(part)
        is_blank = is_blank and not part.strip()
        if part.endswith(b"\n"):
            n_rows, is_blank = n_rows + (not is_blank), True
    return n_rows + (not is_blank), n_bytes


def _count_records(path: Path, check: Callable[[], object]) -> int:
    if file_format(path) == "parquet":
        file = _parquet_file(path)
        _check_columns(file.schema_arrow.names)
        return int(file.metadata.num_rows)
    with (
        path.open("rb", buffering=0) as opened,
        decompressed(opened, compression_of(path), READ_BYTES) as content,
    ):
        n_rows = 0
        for _ in _read_csv(content, FinishedRows()):
            check()
            n_rows += 1
        return n_rows


def read_records(path: Path, fingerprint: Fingerprint, finished: FinishedRows, max_line_bytes: int) -> Iterator[Record]:
    """Yield the records of a file. Bytes that were appended to its text are not read.

    Args:
        path: The file.
        fingerprint: The fingerprint of the file when the run began.
        finished: The numbers of rows whose records are `SKIPPED`.
        max_line_bytes: Longest line of a JSONL file.

    Raises:
        InputChanged: The records were read from another content than that of the fingerprint.
    """
    if file_format(path) == "parquet":
        with path.open("rb") as opened:
            yield from _read_parquet(opened, finished)
            if not fingerprint.describes(os.fstat(opened.fileno())):
                opened.seek(0)
                if hashlib.file_digest(opened, "sha256").hexdigest() != fingerprint.sha256:
                    raise InputChanged
        return
    with open_described(path, fingerprint) as file:
        if file_format(path) == "csv":
            yield from _read_csv(file, finished)
        else:
            yield from _read_jsonl(file, finished, max_line_bytes)


def _read_jsonl(file: BinaryIO, finished: FinishedRows, max_line_bytes: int) -> Iterator[Record]:
    number = 0
    while line := file.readline(max_line_bytes):
        number += 1
        record = SKIPPED
        if len(line) == max_line_bytes and not line.endswith(b"\n"):
            _skip_line(file)
            record = InvalidRequest(f"the line is longer than {max_line_bytes} bytes")
        elif line.strip() and number not in finished:
            record = decode_line(line)
        yield number, SKIPPED if number in finished else record


def _skip_line(file: BinaryIO) -> None:
    while (part := file.readline(READ_BYTES)) and not part.endswith(b"\n"):
        pass


def decode_line(line: bytes) -> object:
    """Return the decoded JSON of a line, or the decoding error."""
    try:
        return _decode_json(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as exc:
        return InvalidRequest(f"not JSON: {exc}")


def _read_csv(file: BinaryIO, finished: FinishedRows) -> Iterator[Record]:
    """Yield the records of a CSV file, and close it."""
    csv.field_size_limit(MAX_ROW_CHARS)
    with TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        rows = _csv_rows(text)
        header = next(rows, None)
        if header is None:
            return
        _check_columns(header)
        for number, cells in enumerate(rows, start=1):
            yield number, SKIPPED if number in finished else _decode_row(header, cells)


def _check_columns(names: Sequence[str]) -> None:
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


def _csv_rows(file: TextIO) -> Iterator[list[str]]:
    """Yield the rows of a CSV file that are not blank, the header too.

    Raises:
        csv.Error: A quote is not closed, or is not doubled within a cell. The rows behind it cannot be told apart. Or
            a row is longer than `MAX_ROW_CHARS`.
    """
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


def _decode_row(header: Sequence[str], cells: Sequence[str]) -> object:
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
        return _decode_json(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"column {name}: not JSON: {exc}") from exc


def _decode_json(text: str) -> object:
    """Return the decoded JSON. Raises `ValueError` also for NaN and Infinity, which are not JSON."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _read_parquet(opened: BinaryIO, finished: FinishedRows) -> Iterator[Record]:
    file = _parquet_file(opened)
    columns = [name for name in file.schema_arrow.names if name in TABLE_COLUMNS]
    number = 0
    for batch in file.iter_batches(batch_size=PARQUET_ROWS_AT_ONCE, columns=columns):
        for record in batch.to_pylist(maps_as_pydicts="lossy"):
            number += 1
            yield number, SKIPPED if number in finished else record


def _parquet_file(source: Path | BinaryIO) -> Any:
    # Otherwise pyarrow reads whole row groups into memory, and most files have one for each million rows.
    return pyarrow_module("pyarrow.parquet").ParquetFile(source, buffer_size=READ_BYTES, pre_buffer=False)
