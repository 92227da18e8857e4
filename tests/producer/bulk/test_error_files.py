"""The error file belongs to one run alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.support.bulk_runs import EXPECTED, Rows, served_client, texts

from llamaq.common.errors import BulkRunRefused
from llamaq.producer.bulk import BulkRun, BulkState, drop_errors, execute
from llamaq.producer.bulk.output_files import open_output
from llamaq.producer.bulk.run_description import default_error_file, description_file


def begin(run: BulkRun) -> None:
    """Leave the files of a run that was stopped before its first row."""
    with open_output(run):
        pass


async def test_outputs_that_differ_in_their_suffix_have_separate_error_files(
    redis_url: str, queue: str, rows: Rows, tmp_path: Path
) -> None:
    """The failed rows of the second run counted as finished rows of the first one, which lost them."""
    begin(rows.run)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("bad\n" * 30)
    async with served_client(redis_url, queue) as (client, _):
        await execute(BulkRun(input=bad, output=rows.output.with_suffix(".csv")), client)
        progress = await execute(rows.run, client)
    assert (progress.state, progress.rows_failed) == (BulkState.COMPLETED, 0)
    assert sorted(texts(rows.answers())) == EXPECTED


@pytest.mark.parametrize("form", ["plain", "openai"])
async def test_the_error_file_of_another_run_is_refused_and_kept(
    redis_url: str, queue: str, rows: Rows, tmp_path: Path, form: str
) -> None:
    begin(rows.run)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("bad\n")
    other = BulkRun(input=bad, output=tmp_path / "other.jsonl", form=form)
    run = rows.with_fields(errors=other.error_file)
    async with served_client(redis_url, queue) as (client, _):
        await execute(other, client)
        with pytest.raises(BulkRunRefused, match=f"has rows of run {other.run_id}"):
            await execute(run, client)
    with pytest.raises(BulkRunRefused, match="has rows of run"):
        drop_errors(run)
    assert len(other.error_file.read_text().splitlines()) == 1


async def test_a_run_of_an_earlier_version_keeps_its_error_file(redis_url: str, queue: str, tmp_path: Path) -> None:
    rows = Rows(tmp_path, "bad", {"prompt": "good"})
    begin(rows.run)
    early, described = tmp_path / "out.errors.jsonl", description_file(rows.output)
    assert rows.run.error_file == tmp_path / "out.jsonl.errors.jsonl"
    rows.run.error_file.unlink()
    early.write_text('{"line": 1, "id": null, "error": {}}\n')
    stored = json.loads(described.read_text())
    stored["run"]["errors"] = None
    described.write_text(json.dumps(stored))
    async with served_client(redis_url, queue) as (client, _):
        progress = await execute(rows.run, client)
    assert (rows.run.error_file, default_error_file(rows.output)) == (early, early)
    assert (progress.rows_done, progress.rows_failed) == (2, 1)
    assert len(rows.errors()) == 1
    assert drop_errors(rows.run) == 1
    assert not early.exists()


async def test_a_run_that_is_continued_without_its_option_keeps_its_error_file(
    redis_url: str, queue: str, tmp_path: Path
) -> None:
    """A second error file was opened, and the failed rows were computed again."""
    rows = Rows(tmp_path, "bad", {"prompt": "good"})
    chosen = tmp_path / "bad.jsonl"
    async with served_client(redis_url, queue) as (client, _):
        await execute(rows.with_fields(errors=chosen), client)
        progress = await execute(rows.run, client)
        rows.input.write_text("other\n")
        with pytest.raises(BulkRunRefused, match=rf"or delete {rows.output}, {chosen} and "):
            await execute(rows.run, client)
    assert (progress.rows_before, progress.rows_failed) == (2, 1)
    assert (rows.run.error_file, len(rows.errors())) == (chosen, 1)
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()


def test_the_error_file_moves_with_the_output(rows: Rows, tmp_path: Path) -> None:
    begin(rows.run)
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (rows.output, rows.run.error_file, description_file(rows.output)):
        path.rename(moved / path.name)
    assert default_error_file(moved / "out.jsonl") == moved / "out.jsonl.errors.jsonl"


@pytest.mark.parametrize("field", ["errors", "output"])
@pytest.mark.parametrize("kind", ["device", "fifo", "folder"])
def test_what_is_not_a_regular_file_is_refused_before_the_run_begins(rows: Rows, field: str, kind: str) -> None:
    """A FIFO would block the run, and a device cannot be shortened. A table is written at the end of the run."""
    named = rows.output.with_name("named.csv" if field == "output" else "named.jsonl")
    if kind == "device":
        named.symlink_to("/dev/null")
    elif kind == "fifo":
        os.mkfifo(named)
    else:
        named.mkdir()
    run = rows.with_fields(**{field: named})
    with pytest.raises(BulkRunRefused, match=f"{named} is not a regular file: name another one"), open_output(run):
        pass
    assert not description_file(run.output).exists()
    begin(rows.run)


@pytest.mark.parametrize("line", ['{"threads": 4}', "[section]", '{"id": 7}'])
def test_a_file_of_one_line_without_newline_is_refused_and_kept(rows: Rows, line: str) -> None:
    """It was taken for a row that a crash has cut off, and emptied."""
    begin(rows.run)
    other = rows.output.with_name("config.json")
    other.write_text(line)
    run = rows.with_fields(errors=other)
    with pytest.raises(BulkRunRefused, match=r"config\.json has lines that no bulk run wrote"):
        begin(run)
    assert other.read_text() == line


@pytest.mark.parametrize("torn", ["{", '{"lin', '{"line": 1', '{"id": "batch_req_x_1", "cust', '{"li\0\0', "\0\0\0"])
def test_a_row_that_a_crash_has_cut_off_is_removed(rows: Rows, torn: str) -> None:
    """Blocks of a file that had not reached the disk may be zero bytes."""
    begin(rows.run)
    whole = f'{{"line": 1, "run_id": "{rows.run.run_id}", "id": "a"}}\n'
    rows.run.error_file.write_text(whole + torn)
    with open_output(rows.run) as files:
        assert files.n_failed == 1
    assert rows.run.error_file.read_text() == whole
