"""Stores the rows of standard input in a file, because a run must be able to read its input again."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import BinaryIO

from llamaq.common.errors import BulkRunRefused
from llamaq.producer.bulk.appended_file import AppendedFile
from llamaq.producer.bulk.compression import compression_in
from llamaq.producer.bulk.described_file import READ_BYTES
from llamaq.producer.bulk.output_files import list_files
from llamaq.producer.bulk.run_description import BulkRun


def spooled_file(output: Path) -> Path:
    """Return the file for the rows of standard input, whose answers are written to an output file."""
    return output.with_name(output.name + ".input.jsonl")


def spool(source: BinaryIO, run: BulkRun) -> None:
    """Store all rows of a stream in the input file of a run. A crash leaves the earlier file or the new one.

    Args:
        source: The stream. It is read to its end.
        run: The run. If the file exists, its rows must be the same: a run that has begun or is submitted reads them.

    Raises:
        BulkRunRefused: The stream has no rows, is compressed, or has other rows than the file. Or the file cannot
            be written.
        BulkRunBusy: Another process stores rows for the same output.
    """
    new = run.input.with_name(run.input.name + ".new")
    with AppendedFile.open(new) as file:
        file.clear()
        try:
            _copy(source, file)
            if not run.input.exists():
                new.replace(run.input)
            elif filecmp.cmp(new, run.input, shallow=False):
                new.unlink()
            else:
                files = f"{run.input}, {list_files(run.output, run.error_file)}"
                raise BulkRunRefused(
                    f"{run.input} has other rows than standard input: name another output file, or delete {files}"
                )
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def _copy(source: BinaryIO, file: AppendedFile) -> None:
    part = source.read(READ_BYTES)
    if not part:
        raise BulkRunRefused("standard input is empty: the command before the pipe has written no rows")
    if compression_in(part):
        raise BulkRunRefused("standard input is compressed: decompress it before the pipe, or name the file")
    while part:
        file.append(part)
        file.flush()
        part = source.read(READ_BYTES)
    file.sync()
