"""The files that a run writes: answers, errors, and the description that a later process reads to continue the run."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import BaseModel, ValidationError

from llamaq.common.errors import BulkRunRefused
from llamaq.producer.bulk.appended_file import AppendedFile, refusing_to_write, replacing
from llamaq.producer.bulk.compression import check_can_open
from llamaq.producer.bulk.described_file import Fingerprint, InputChanged
from llamaq.producer.bulk.input_file import (
    READ_ERRORS,
    ROWS_PER_YIELD,
    SKIPPED,
    FinishedRows,
    Record,
    do_nothing,
    file_format,
    read_records,
    take_fingerprint,
)
from llamaq.producer.bulk.output_lines import is_torn, row_number_of
from llamaq.producer.bulk.pyarrow_import import pyarrow_module
from llamaq.producer.bulk.run_description import BulkRun, default_error_file, description_file, rows_file
from llamaq.producer.bulk.table_writer import write_compressed, write_table


class StoredRun(BaseModel):
    """The file `OUTPUT.run.json`: the run that writes the output."""

    run: BulkRun
    input: Fingerprint


def read_stored_run(output: Path) -> StoredRun | None:
    """Return the run that writes an output file. None: there is no such file.

    Raises:
        BulkRunRefused: The description is damaged.
    """
    path = description_file(output)
    try:
        return StoredRun.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as exc:
        files = list_files(output, default_error_file(output))
        raise BulkRunRefused(f"{path} cannot be read: delete {files} to start the run again: {exc}") from exc


def list_files(output: Path, error_file: Path) -> str:
    """Return the files that another run into the same output finds in its way, as a part of a sentence."""
    files = map(str, _full_files(output, error_file))
    return " and ".join(filter(None, [", ".join(files), str(description_file(output))]))


def _full_files(output: Path, error_file: Path) -> list[Path]:
    return [path for path in dict.fromkeys((output, rows_file(output), error_file)) if _has_content(path)]


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def run_id_of(output: Path) -> str | None:
    """Return the name of the run that writes an output file. None: no run has written the file, or it does not exist.

    Raises:
        BulkRunRefused: The description of the run is damaged.
    """
    stored = read_stored_run(output)
    return None if stored is None else stored.run.run_id


def write_stored_run(output: Path, stored: StoredRun) -> None:
    """Write the description of a run. A crash leaves the earlier file or the new one."""
    path = description_file(output)
    with refusing_to_write(path), replacing(path) as new:
        new.write_text(stored.model_dump_json(indent=1) + "\n")


def prepare_description(run: BulkRun, check: Callable[[], object] = do_nothing) -> StoredRun:
    """Return the description of the run. It reads the whole input file of a new run, and writes no file.

    Args:
        run: The run.
        check: Called for each row of a new run. It may raise an error to end the read.

    Raises:
        BulkRunRefused: The input cannot be read, or the output is of another run.
    """
    stored = read_stored_run(run.output)
    try:
        if stored is not None and stored.input.describes(run.input.stat()):
            fingerprint = stored.input
        else:
            fingerprint = take_fingerprint(run.input, check)
    except READ_ERRORS as exc:
        raise BulkRunRefused(f"{run.input} cannot be read: {exc}") from exc
    if stored is None:
        if full := _full_files(run.output, run.error_file):
            raise BulkRunRefused(
                f"{full[0]} exists and is not of a bulk run into {run.output}: name another file (-o, --errors), or "
                "delete it"
            )
        return StoredRun(run=run.model_copy(update={"errors": run.error_file}), input=fingerprint)
    _check_same(run, stored, fingerprint)
    return stored


def _check_same(run: BulkRun, stored: StoredRun, fingerprint: Fingerprint) -> None:
    """Check that the stored run is the run to continue."""
    way_out = f"name another output file, or delete {list_files(run.output, run.error_file)}"
    if (fingerprint.sha256, fingerprint.n_rows) != (stored.input.sha256, stored.input.n_rows):
        raise BulkRunRefused(f"{run.output} was begun with another input than {run.input} is now: {way_out}")
    before, now = stored.run.row_parameters(), run.row_parameters()
    changed = [name for name in now if now[name] != before[name]]
    if changed:
        if changed == ["run_id"]:
            way_out = f"continue it with run_id {stored.run.run_id!r}, {way_out}"
        raise BulkRunRefused(
            f"{run.output} was begun with other values of {', '.join(changed)}: "
            f"{changed[0]} was {before[changed[0]]!r:.200} and is {now[changed[0]]!r:.200} now: {way_out}"
        )


class OutputFiles:
    """The open output file and error file of a run, and the rows in them."""

    def __init__(self, run: BulkRun, stored: StoredRun, answers: AppendedFile, errors: AppendedFile) -> None:
        self._stored = stored
        self._run = run
        self._answers = answers
        self._errors = errors
        self.finished = FinishedRows()
        """The rows in both files."""
        self._read_rows(answers)
        n_answers = len(self.finished)
        self._read_rows(errors)
        self.n_failed = len(self.finished) - n_answers
        """Number of rows in the error file."""
        self.n_rows = stored.input.n_rows

    def __repr__(self) -> str:
        return f"<OutputFiles {self._answers.path} finished={len(self.finished)} failed={self.n_failed}>"

    def _read_rows(self, file: AppendedFile) -> None:
        """Add the rows of a file."""
        highest = self._stored.input.max_rows
        for line in file.read_lines():
            if not is_torn(line):
                self.finished.add(row_number_of(line, file.path, highest, self._run.run_id))

    async def records(self, max_line_bytes: int) -> AsyncIterator[Record]:
        """Yield the records of the input that are not finished.

        Raises:
            BulkRunRefused: The input cannot be read, or was changed after the run began.
        """
        run = self._run
        try:
            for number, record in read_records(run.input, self._stored.input, self.finished, max_line_bytes):
                if number % ROWS_PER_YIELD == 0:
                    await asyncio.sleep(0)
                if record is not SKIPPED:
                    yield number, record
        except InputChanged as exc:
            raise BulkRunRefused(
                f"{run.input} was changed while the run read it, so rows may be missing or mixed: delete "
                f"{list_files(run.output, run.error_file)} to start again with the file as it is now"
            ) from exc
        except READ_ERRORS as exc:
            raise BulkRunRefused(f"{run.input} cannot be read: {exc}") from exc

    def add_answer(self, number: int, line: bytes) -> None:
        """Append the answer of a row."""
        self._answers.append(line)
        self.finished.add(number)

    def add_error(self, number: int, line: bytes) -> None:
        """Append the error of a row."""
        self._errors.append(line)
        self.finished.add(number)
        self.n_failed += 1

    async def flush(self) -> None:
        """Pass the added lines to the operating system: they survive the end of this process, also a crash."""
        self._answers.flush()
        self._errors.flush()

    def complete(self) -> None:
        """End the run: write everything to the disk, sort the answers if the run is ordered, and write the table or the
        compressed file.
        """
        self._answers.sync()
        self._errors.sync()
        with refusing_to_write(self._run.output):
            if self._run.ordered:
                bring_into_order(rows_file(self._run.output))
            if self._run.writes_table:
                write_table(rows_file(self._run.output), self._run.output)
            elif rows_file(self._run.output) != self._run.output:
                write_compressed(rows_file(self._run.output), self._run.output)
            if not self.n_failed:
                self._run.error_file.unlink(missing_ok=True)


@contextmanager
def open_output(run: BulkRun, check: Callable[[], object] = do_nothing) -> Iterator[OutputFiles]:
    """Open the output file and the error file of a run, cut torn last lines, and read which rows are in them.

    Args:
        run: The run.
        check: Called for each row of a new run while the input is read. It may raise an error to end the read.

    Raises:
        BulkRunRefused: A file is not of this run, cannot be opened, or another process executes the run.
    """
    if not run.input.is_file():
        reason = "there is no such file"
        if run.input.exists():
            reason = "it is not a file, which a run can read again to continue: store its rows in a file, or name `-`"
        raise BulkRunRefused(f"{run.input}: {reason}")
    if "parquet" in (file_format(run.input), file_format(run.output)):
        pyarrow_module("pyarrow.parquet")  # raises before anything is computed
    for path in (run.input, run.output, run.error_file):
        check_can_open(path)
        with refusing_to_write(path):
            if path.exists() and not path.is_file():
                raise BulkRunRefused(f"{path} is not a regular file: name another one")
    stored = prepare_description(run, check)  # before the files are opened: a run that is refused creates none
    with ExitStack() as exits:
        paths = (rows_file(run.output), run.error_file)
        answers, errors = (exits.enter_context(AppendedFile.open(path)) for path in paths)
        if (begun := read_stored_run(run.output)) is None:
            write_stored_run(run.output, stored)
        else:  # perhaps by another process since then
            _check_same(run, begun, stored.input)
        yield OutputFiles(run, stored, answers, errors)


def bring_into_order(path: Path) -> None:
    """Sort the lines of a file by row number, with 8 bytes of memory for each. A crash leaves the file as it was."""
    with path.open("rb") as file:
        highest, is_sorted = 0, True
        for line in file:
            number = row_number_of(line, path)
            is_sorted = is_sorted and number > highest
            highest = max(highest, number)
        if is_sorted:
            return
        offsets = array("q", [-1]) * (highest + 1)
        offset = file.seek(0)
        for line in file:
            offsets[row_number_of(line, path)] = offset
            offset += len(line)
        with replacing(path) as new, new.open("wb") as sorted_file:
            for offset in offsets:
                if offset >= 0:
                    file.seek(offset)
                    sorted_file.write(file.readline())
