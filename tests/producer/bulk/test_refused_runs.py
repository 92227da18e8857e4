"""Bulk runs that are refused: another input, other parameters, damaged files, another process."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.bulk_runs import EXPECTED, Rows, served_client, texts

from llamaq.common.errors import BulkRunBusy, BulkRunRefused
from llamaq.producer import AsyncClient
from llamaq.producer.bulk import (
    BulkProgress,
    BulkRun,
    BulkState,
    described_file,
    execute,
    execution,
    output_files,
    table_writer,
)
from llamaq.producer.bulk.execution import OnProgress
from llamaq.producer.bulk.output_files import (
    StoredRun,
    open_output,
    prepare_description,
    read_stored_run,
    write_stored_run,
)

Change = Callable[[list[str]], list[str]]
"""Returns the new lines of an input file."""


def changing(rows: Rows, change: Change) -> OnProgress:
    """Return a receiver of progress that writes the input file once, after the first answer."""
    lines = rows.input.read_text().splitlines(keepends=True)

    def on_progress(progress: BulkProgress) -> None:
        if progress.rows_done and rows.input.read_text() == "".join(lines):
            rows.input.write_text("".join(change(lines)))

    return on_progress


def delete_files(sentence: str) -> None:
    for path in sentence.replace(" and ", ", ").split(", "):
        Path(path).unlink()


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
async def test_the_way_out_of_another_input_names_all_files(
    redis_url: str, queue: str, tmp_path: Path, suffix: str
) -> None:
    run = Rows(tmp_path, {"prompt": "good"}, "bad").with_fields(output=tmp_path / f"out.{suffix}")
    async with served_client(redis_url, queue) as (client, _):
        await execute(run, client)
        run.input.write_text('{"prompt": "other"}\n')
        with pytest.raises(BulkRunRefused, match="was begun with another input") as caught:
            await execute(run, client)
        delete_files(str(caught.value).partition(", or delete ")[2])
        again = await execute(run.model_copy(update={"run_id": "another"}), client)
    assert (again.rows_done, again.rows_failed) == (1, 0)


async def test_the_way_out_of_another_run_id_is_the_id_of_the_run(redis_url: str, queue: str, rows: Rows) -> None:
    other = rows.with_fields(run_id="other")
    async with served_client(redis_url, queue) as (client, _):
        await execute(rows.run, client)
        with pytest.raises(BulkRunRefused, match=f"now: continue it with run_id '{rows.run.run_id}', name another"):
            await execute(other, client)
        with pytest.raises(BulkRunRefused, match=r"other values of run_id, options: .* now: name another output file"):
            await execute(other.model_copy(update={"options": {"temperature": 0.5}}), client)


async def test_a_damaged_description_names_all_files(redis_url: str, queue: str, tmp_path: Path) -> None:
    rows = Rows(tmp_path, {"prompt": "good"}, "bad")
    async with served_client(redis_url, queue) as (client, _):
        await execute(rows.run, client)
        (tmp_path / "out.jsonl.run.json").write_text("{")
        with pytest.raises(BulkRunRefused, match=r"delete \S+out.jsonl, \S+out.jsonl.errors.jsonl and \S+run.json "):
            await execute(rows.run, client)


async def test_a_run_of_another_input_or_with_other_parameters_is_refused(
    redis_url: str, queue: str, rows: Rows, tmp_path: Path
) -> None:
    async with served_client(redis_url, queue) as (client, _):
        await execute(rows.run, client)
        with pytest.raises(BulkRunRefused, match="other values of options"):
            await execute(rows.with_fields(options={"temperature": 0.5}), client)
        rows.input.write_text(rows.input.read_text().replace("prompt 3", "prompt x"))
        with pytest.raises(BulkRunRefused, match="another input"):
            await execute(rows.run, client)
        with pytest.raises(BulkRunRefused, match="no such file"):
            await execute(rows.with_fields(input=tmp_path / "missing.jsonl"), client)
        for name in ("foreign.jsonl", "foreign.csv"):
            foreign = tmp_path / name
            foreign.write_text("{}\n")
            with pytest.raises(BulkRunRefused, match="is not of a bulk run"):
                await execute(rows.with_fields(output=foreign), client)
            assert foreign.read_text() == "{}\n"


def test_a_file_system_without_locks_is_not_taken_for_another_process(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(BulkRunRefused, match="cannot be written: No locks available"), open_output(rows.run):
        pass


def test_a_refused_run_creates_no_file(rows: Rows, tmp_path: Path) -> None:
    not_utf_8, foreign = tmp_path / "in.csv", tmp_path / "foreign.csv"
    not_utf_8.write_bytes(b"prompt\n\xff\n")
    foreign.write_text("1,2\n")
    before = sorted(tmp_path.iterdir())
    for fields in ({"input": not_utf_8}, {"output": foreign}, {"errors": foreign}):
        with pytest.raises(BulkRunRefused), open_output(rows.with_fields(**fields)):
            pass
        assert sorted(tmp_path.iterdir()) == before


def test_a_run_that_begins_while_another_process_reads_its_input_is_not_mixed_with_it(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = prepare_description(rows.with_fields(run_id="other"))

    def read_while_other_begins(run: BulkRun, _: object) -> StoredRun:
        write_stored_run(run.output, other)
        return StoredRun(run=run, input=other.input)

    monkeypatch.setattr(output_files, "prepare_description", read_while_other_begins)
    with pytest.raises(BulkRunRefused, match="was begun with other values of run_id"), open_output(rows.run):
        pass
    assert read_stored_run(rows.output) == other


def replace_prompts(lines: list[str]) -> list[str]:
    return [line.replace("prompt", "PROMPT") for line in lines]


@pytest.mark.parametrize(
    "change", [replace_prompts, lambda lines: lines[:20], lambda lines: [*lines[:20], "\n" * 2000]]
)
async def test_a_run_whose_input_is_changed_while_it_is_read_does_not_complete(
    redis_url: str, queue: str, rows: Rows, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    monkeypatch.setattr(described_file, "READ_BYTES", 64)
    async with served_client(redis_url, queue) as (client, _):
        with pytest.raises(BulkRunRefused, match="was changed while the run read it") as caught:
            await execute(rows.with_fields(window=2, rate=20.0), client, on_progress=changing(rows, change))
        with pytest.raises(BulkRunRefused, match="was begun with another input"):
            await execute(rows.run, client)
        delete_files(str(caught.value).partition(": delete ")[2].partition(" to start")[0])
        again = await execute(rows.with_fields(run_id="another"), client)
    assert again.state is BulkState.COMPLETED


async def test_rows_that_are_appended_while_a_run_reads_its_input_are_not_computed(
    redis_url: str, queue: str, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(described_file, "READ_BYTES", 64)
    on_progress = changing(rows, lambda lines: [*lines, lines[0]])
    async with served_client(redis_url, queue) as (client, _):
        progress = await execute(rows.with_fields(window=2, rate=20.0), client, on_progress=on_progress)
    assert (progress.state, progress.rows_done, progress.rows_total) == (BulkState.COMPLETED, 30, 30)
    assert len(rows.answers()) == 30
    assert len(rows.input.read_text().splitlines()) == 31


@pytest.mark.parametrize(
    "change",
    [Path.unlink, lambda path: path.rename(path.with_suffix(".moved")), lambda path: os.truncate(path, 10)],
    ids=["deleted", "moved", "shortened"],
)
@pytest.mark.parametrize("is_last", [False, True])
async def test_a_run_whose_output_is_changed_does_not_complete_and_can_be_started_again(
    redis_url: str, queue: str, rows: Rows, change: Callable[[Path], object], is_last: bool
) -> None:
    """Such a run ended with exit code 0, and the answers were lost."""
    run = rows.with_fields(window=2, rate=None if is_last else 40.0)
    n_rows_before = 30 if is_last else 1
    changes = iter([change])

    def on_progress(progress: BulkProgress) -> None:
        if progress.rows_done >= n_rows_before:
            for one in changes:
                one(rows.output)

    async with served_client(redis_url, queue) as (client, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(execution, "REPORT_S", 0.0)
            with pytest.raises(BulkRunRefused, match="was deleted, replaced or changed by another program"):
                await execute(run, client, on_progress=on_progress)
        progress = await execute(run, client)
    assert progress.state is BulkState.COMPLETED
    assert sorted(texts(rows.answers())) == EXPECTED


async def test_a_table_that_cannot_be_written_leaves_no_part_of_it(
    redis_url: str, queue: str, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_on_full_disk(_: object, path: Path, *__: object) -> None:
        path.write_text("a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    run = rows.with_fields(output=rows.output.with_suffix(".csv"))
    async with served_client(redis_url, queue) as (client, _):
        with monkeypatch.context() as patch:
            patch.setattr(table_writer, "_write_csv", write_on_full_disk)
            with pytest.raises(BulkRunRefused, match="cannot be written: No space left on device"):
                await execute(run, client)
        assert not list(run.output.parent.glob("*.new"))
        await execute(run, client)
    assert run.output.exists()


async def test_a_run_that_another_process_executes_is_refused(redis_url: str, queue: str, rows: Rows) -> None:
    async with AsyncClient(redis_url, queue) as client:
        running = asyncio.create_task(execute(rows.run, client))
        while not (await client.queue_depth()).waiting:  # noqa: ASYNC110  # Redis has no event for it
            await asyncio.sleep(0.01)
        with pytest.raises(BulkRunBusy):
            await execute(rows.run, client)
        running.cancel()
        await asyncio.wait([running])
        assert not (await client.queue_depth()).waiting  # the jobs of a cancelled call are cancelled
