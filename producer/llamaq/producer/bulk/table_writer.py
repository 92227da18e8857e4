"""Writes the answers of a run as a table, which is a CSV or Parquet file, or as a compressed JSONL file."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any

from llamaq.producer.bulk.appended_file import replacing
from llamaq.producer.bulk.compression import compressing, compression_of
from llamaq.producer.bulk.input_file import file_format
from llamaq.producer.bulk.pyarrow_import import pyarrow_module

ROWS_AT_ONCE = 1000
COPY_BYTES = 1024 * 1024
NESTED_COLUMNS = ("metadata", "embeddings", "prompt_logprobs", "logprobs")
COLUMNS = (
    "line", "id", "text", "tokens", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens", "seed",
    *NESTED_COLUMNS,
)  # fmt: skip
"""The columns of a table. `line` is the number of the row in the input, from 1 on."""


def write_table(answers: Path, table: Path) -> None:
    """Write the plain answers of a JSONL file as a table. A crash leaves the earlier table or the new one.

    Args:
        answers: The JSONL file.
        table: The file to write: .csv, .csv.gz, .csv.zst or .parquet.

    Raises:
        MissingExtra: A Parquet file is wanted, and pyarrow is not installed.
    """
    with answers.open("rb") as lines, replacing(table) as new:
        records = (_record(json.loads(line)) for line in lines)
        if file_format(table) == "parquet":
            _write_parquet(records, new)
        else:
            _write_csv(records, new, compression_of(table))


def write_compressed(answers: Path, target: Path) -> None:
    """Compress a JSONL file. A crash leaves the earlier target or the new one.

    Args:
        answers: The JSONL file.
        target: The file to write: .jsonl.gz or .jsonl.zst.
    """
    with (
        answers.open("rb") as lines,
        replacing(target) as new,
        compressing(new, compression_of(target)) as compressed,
    ):
        shutil.copyfileobj(lines, compressed, COPY_BYTES)


def _record(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the record of an answer. A column has one type: an id is a text, and nested values are JSON."""
    usage = answer["usage"]
    return {name: answer.get(name) for name in COLUMNS} | {
        "id": None if answer["id"] is None else str(answer["id"]).encode(errors="replace").decode(),
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        **{name: _as_json(answer.get(name)) for name in NESTED_COLUMNS},
    }


def _as_json(value: object) -> str | None:
    return None if value is None else json.dumps(value)


def _write_csv(records: Iterator[dict[str, Any]], path: Path, compression: str | None) -> None:
    with (
        compressing(path, compression) as target,
        TextIOWrapper(target, encoding="utf-8", newline="") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for record in records:
            writer.writerow(record | {"tokens": _as_json(record["tokens"])})


def _write_parquet(records: Iterator[dict[str, Any]], path: Path) -> None:
    arrow, parquet = pyarrow_module("pyarrow"), pyarrow_module("pyarrow.parquet")
    number, text = arrow.int64(), arrow.string()
    types = (number, text, text, arrow.list_(arrow.int32()), text, number, number, number, number)
    schema = arrow.schema(list(zip(COLUMNS, types + (text,) * len(NESTED_COLUMNS), strict=True)))
    with parquet.ParquetWriter(path, schema) as writer:
        while some := list(islice(records, ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(some, schema))
