"""Reads the rows of an input file, one after the other, and fingerprints the file."""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

from llamaq.common.errors import BulkRunRefused, InvalidRequest
from llamaq.producer.bulk.compression import compression_in, compression_of, decompressed, uncompressed_path
from llamaq.producer.bulk.described_file import (
    READ_BYTES,
    DigestedBytes,
    Fingerprint,
    InputChanged,
    open_described,
)
from llamaq.producer.bulk.pyarrow_import import pyarrow_module
from llamaq.producer.bulk.table_rows import TABLE_COLUMNS, check_columns, csv_rows, decode_json, decode_row

READ_ERRORS = (OSError, ValueError, csv.Error)
"""Errors of a file that cannot be read. Those of pyarrow are among them."""
PARQUET_ROWS_AT_ONCE = 16
"""Rows that are decoded at once. Each may be as large as the largest request, also in a file of a few bytes."""

Record = tuple[int, object]
"""A row number, and the record: a decoded JSON value, or the decoding error."""


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
        check_columns(file.schema_arrow.names)
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
    """Yield the records of a file that are not finished. Bytes that were appended to its text are not read.

    Args:
        path: The file.
        fingerprint: The fingerprint of the file when the run began.
        finished: The numbers of rows that are skipped.
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
        if len(line) == max_line_bytes and not line.endswith(b"\n"):
            _skip_line(file)
            if number not in finished:
                yield number, InvalidRequest(f"the line is longer than {max_line_bytes} bytes")
        elif number not in finished and line.strip():
            yield number, decode_line(line)


def _skip_line(file: BinaryIO) -> None:
    while (part := file.readline(READ_BYTES)) and not part.endswith(b"\n"):
        pass


def decode_line(line: bytes) -> object:
    """Return the decoded JSON of a line, or the decoding error."""
    try:
        return decode_json(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as exc:
        return InvalidRequest(f"not JSON: {exc}")


def _read_csv(file: BinaryIO, finished: FinishedRows) -> Iterator[Record]:
    """Yield the records of a CSV file that are not finished, and close it."""
    with TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        rows = csv_rows(text)
        header = next(rows, None)
        if header is None:
            return
        check_columns(header)
        for number, cells in enumerate(rows, start=1):
            if number not in finished:
                yield number, decode_row(header, cells)


def _read_parquet(opened: BinaryIO, finished: FinishedRows) -> Iterator[Record]:
    file = _parquet_file(opened)
    columns = [name for name in file.schema_arrow.names if name in TABLE_COLUMNS]
    number = 0
    for batch in file.iter_batches(batch_size=PARQUET_ROWS_AT_ONCE, columns=columns):
        for record in batch.to_pylist(maps_as_pydicts="lossy"):
            number += 1
            if number not in finished:
                yield number, record


def _parquet_file(source: Path | BinaryIO) -> Any:
    # Otherwise pyarrow reads whole row groups into memory, and most files have one for each million rows.
    return pyarrow_module("pyarrow.parquet").ParquetFile(source, buffer_size=READ_BYTES, pre_buffer=False)
