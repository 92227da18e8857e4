"""Tables of bulk runs: what their cells mean, and how answers are written."""

from __future__ import annotations

import csv
import json
import random
import tracemalloc
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from tests.support.bulk_runs import served_client

from llamaq.common.errors import BulkRunRefused, InvalidRequest
from llamaq.producer import AsyncClient
from llamaq.producer.bulk import BulkRun, described_file, execute, input_file
from llamaq.producer.bulk.described_file import READ_BYTES, InputChanged
from llamaq.producer.bulk.input_file import FinishedRows, read_records, take_fingerprint
from llamaq.producer.bulk.input_row import read_row, row_key
from llamaq.producer.bulk.orphaned_job_cancellation import cancel_rows_in_flight
from llamaq.producer.bulk.output_files import prepare_description
from llamaq.producer.bulk.pyarrow_import import pyarrow_module
from llamaq.producer.bulk.run_description import RunParameters
from llamaq.producer.bulk.table_writer import write_table


def records_of(path: Path, cells: dict[str, str]) -> list[object]:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(cells))
        writer.writeheader()
        writer.writerow(cells)
    return [record for _, record in read_records(path, take_fingerprint(path), FinishedRows(), 1000)]


def test_cells_with_lists_and_objects_are_json(tmp_path: Path) -> None:
    cells = {
        "prompt": "[not a list]",
        "choice": '["yes", "no"]',
        "tools": "[]",
        "chat_template_kwargs": '{"a": 1}',
        "samplers": "top_k;temp",
        "stop": "END",
        "bad_words": '["x"]',
        "stop_token_ids": "[5, 6]",
        "allowed_token_ids": "[7]",
    }
    lists = {"choice": ["yes", "no"], "bad_words": ["x"], "stop_token_ids": [5, 6], "allowed_token_ids": [7]}
    assert records_of(tmp_path / "in.csv", cells) == [cells | lists | {"tools": [], "chat_template_kwargs": {"a": 1}}]


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    cells = {"prompt": "x" * 200_000}
    assert records_of(tmp_path / "in.csv", cells) == [cells]


def test_a_row_with_more_cells_than_the_header_fails(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('id,max_tokens,prompt\n1,3,Hello, my dear world\n\n2,3,"Hello, you"\n3\n')
    cut, quoted, short = (record for _, record in read_records(path, take_fingerprint(path), FinishedRows(), 1000))
    assert isinstance(cut, InvalidRequest)
    assert str(cut) == "the row has more cells than the header: quote cells that contain a comma"
    assert quoted == {"id": "2", "max_tokens": "3", "prompt": "Hello, you"}
    assert short == {"id": "3"}


@pytest.mark.parametrize("bad", ['2,"not closed\n3,three\n', '2,"one" two"\n3,three\n'])
def test_a_csv_file_with_a_stray_quote_is_refused_with_the_line_of_the_row(tmp_path: Path, bad: str) -> None:
    run = BulkRun(input=tmp_path / "in.csv", output=tmp_path / "out.jsonl")
    run.input.write_text(f'id,prompt\n\n1,"two\nlines"\n{bad}')
    with pytest.raises(BulkRunRefused, match=r"in\.csv cannot be read: the row that begins at line 5: .*its quotes"):
        prepare_description(run)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("id,prompt,note,prompt,note", "the column prompt more than once; its columns are 'id', 'prompt', 'note', 'pr"),
        ("Prompt,id", "none of the columns prompt, tokens, messages, embed; its columns are 'Prompt', 'id'"),
        ("id, prompt", "its columns are 'id', ' prompt'"),
        ("id;prompt", "its columns are 'id;prompt'"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_with_wrong_columns_is_refused(tmp_path: Path, suffix: str, header: str, problem: str) -> None:
    run = BulkRun(input=tmp_path / f"in.{suffix}", output=tmp_path / "out.jsonl")
    if suffix == "parquet":
        parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        names = header.split(",")
        parquet.write_table(pyarrow.table([["x"]] * len(names), names=names), run.input)
    else:
        run.input.write_text(f"{header}\n")
    with pytest.raises(BulkRunRefused) as caught:
        prepare_description(run)
    assert f"in.{suffix} cannot be read: the table has " in str(caught.value)
    assert problem in str(caught.value)


def test_a_csv_file_that_is_rewritten_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(described_file, "READ_BYTES", 16)
    path = tmp_path / "in.csv"
    lines = ["prompt\n", *(f"old {n}\n" for n in range(3000))]
    path.write_text("".join(lines))
    fingerprint = take_fingerprint(path)
    for new, is_changed in (("new 2000\n", True), ("old 2000\n", False)):
        records = read_records(path, fingerprint, FinishedRows(), 1000)
        next(records)
        path.write_text("".join([*lines[:2001], new, *lines[2002:], "appended\n"]))
        if is_changed:
            with pytest.raises(InputChanged):
                list(records)
        else:
            assert list(records)[-1] == (3000, {"prompt": "old 2999"})


def test_a_parquet_file_that_is_rewritten_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    path = tmp_path / "in.parquet"

    def write(text: str) -> None:
        parquet.write_table(pyarrow.table({"prompt": [text] * 3}), path)

    write("old")
    fingerprint = take_fingerprint(path)
    records = read_records(path, fingerprint, FinishedRows(), 1000)
    next(records)
    write("old")
    assert len(list(records)) == 2
    for change in (lambda: write("new"), lambda: path.write_bytes(b"half a file")):
        write("old")
        records = read_records(path, fingerprint, FinishedRows(), 1000)
        next(records)
        change()
        with pytest.raises(InputChanged):
            list(records)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_file_that_is_replaced_or_deleted_while_it_is_read_is_read_to_its_end(
    tmp_path: Path, suffix: str, is_replaced: bool
) -> None:
    path, other = tmp_path / f"in.{suffix}", tmp_path / f"other.{suffix}"
    write_prompts(path, "old")
    write_prompts(other, "new")
    records = read_records(path, take_fingerprint(path), FinishedRows(), 1000)
    next(records)
    if is_replaced:
        other.replace(path)
    else:
        path.unlink()
    assert list(records) == [(2, {"prompt": "old"}), (3, {"prompt": "old"})]


def write_prompts(path: Path, prompt: str) -> None:
    """Write a file with three rows of this prompt."""
    if path.suffix == ".parquet":
        parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.table({"prompt": [prompt] * 3}), path)
    elif path.suffix == ".csv":
        path.write_text("prompt\n" + f"{prompt}\n" * 3)
    else:
        path.write_text(f'{{"prompt": "{prompt}"}}\n' * 3)


@pytest.mark.parametrize(
    ("files", "refused"),
    [
        ({"input": "x.jsonl", "output": "y.csv", "errors": "y.csv.rows.jsonl"}, "y.csv.rows.jsonl"),
        ({"input": "x.jsonl", "output": "z.jsonl", "errors": "z.jsonl.run.json"}, "z.jsonl.run.json"),
        ({"input": "y.parquet.rows.jsonl", "output": "y.parquet"}, "y.parquet.rows.jsonl"),
    ],
)
def test_a_run_does_not_write_its_own_files_twice(files: dict[str, Any], refused: str) -> None:
    with pytest.raises(ValueError, match=f"the run itself writes {refused}: name another file"):
        BulkRun(**files)


async def test_a_reserved_option_without_a_value_is_left_out() -> None:
    row = await read_row(RunParameters(run_id="r"), 1, {"prompt": "x", "priority": None})
    assert (row.error, row.jobs) == (None, [{"prompt": "x"}])
    assert (await read_row(RunParameters(run_id="r"), 1, {"prompt": "x", "priority": "bulk"})).error is not None


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_has_the_embeddings(tmp_path: Path, suffix: str) -> None:
    answers, table = tmp_path / "rows.jsonl", tmp_path / f"out.{suffix}"
    usage = {"prompt_tokens": 3, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}
    answer = {"line": 1, "id": "a", "text": "", "finish_reason": "stop", "usage": usage, "seed": 1}
    answers.write_text(json.dumps(answer | {"embeddings": [[0.5, -1.0]]}) + "\n" + json.dumps(answer) + "\n")
    if suffix == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        write_table(answers, table)
        written = [row["embeddings"] for row in parquet.read_table(table).to_pylist()]
    else:
        write_table(answers, table)
        with table.open(newline="") as file:
            written = [row["embeddings"] or None for row in csv.DictReader(file)]
    assert written == ["[[0.5, -1.0]]", None]


async def test_a_cancelled_run_leaves_no_job_behind_blank_lines(redis_url: str, queue: str) -> None:
    """The rows of a file with a blank line before each row have twice the numbers."""
    async with AsyncClient(redis_url, queue) as client:
        for line in range(2, 21, 2):
            await client.submit("x", idempotency_key=row_key("run", line, 0))
        assert await cancel_rows_in_flight(client, "run", 10) == 10
        assert (await client.queue_depth()).waiting == 0


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
async def test_tables_are_read_and_written(redis_url: str, queue: str, tmp_path: Path, suffix: str) -> None:
    table, copy = tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}"
    records = [{"id": f"row {n}", "prompt": f"prompt {n}", "max_tokens": 5, "note": "ignored"} for n in range(1, 6)]
    _write_table(table, records)
    run = BulkRun(input=table, output=copy, ordered=True)
    async with served_client(redis_url, queue) as (client, _):
        progress = await execute(run, client)
    assert (progress.rows_total, progress.rows_failed) == (5, 0)
    written = _read_table(copy)
    assert [(int(row["line"]), row["id"], row["text"]) for row in written] == [
        (n, f"row {n}", f"re: prompt {n}") for n in range(1, 6)
    ]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
async def test_a_table_has_a_question_mark_for_half_a_surrogate_pair(
    redis_url: str, queue: str, tmp_path: Path, suffix: str
) -> None:
    """The texts of a table are UTF-8, which has no halves. Only an id can have one."""
    (tmp_path / "in.jsonl").write_text('{"id": "\\ud83d", "prompt": "one"}\n')
    run = BulkRun(input=tmp_path / "in.jsonl", output=tmp_path / f"out.{suffix}")
    async with served_client(redis_url, queue) as (client, _):
        await execute(run, client)
    assert [(row["id"], row["text"]) for row in _read_table(run.output)] == [("?", "re: one")]


def test_a_parquet_file_with_one_large_row_group_is_read_in_parts(tmp_path: Path) -> None:
    arrow, parquet = pyarrow_module("pyarrow"), pyarrow_module("pyarrow.parquet")
    path, n_rows, n_bytes = tmp_path / "large.parquet", 10_000, 600
    texts = [random.Random(number).randbytes(n_bytes).hex() for number in range(n_rows)]
    parquet.write_table(arrow.table({"prompt": texts}), path, row_group_size=n_rows)
    assert path.stat().st_size > 8 * READ_BYTES, "its texts cannot be compressed"
    sizes: list[int] = []

    class RecordingFile(FileIO):
        def read(self, size: int | None = -1, /) -> Any:
            data = super().read(size)
            sizes.append(len(data))
            return data

    with RecordingFile(path) as file:
        read = [record["prompt"] for _, record in input_file._read_parquet(file, FinishedRows())]  # type: ignore[index]
    assert read == texts
    assert max(sizes) <= 2 * READ_BYTES


def test_long_rows_of_a_small_parquet_file_do_not_fill_the_memory(tmp_path: Path) -> None:
    """A file of 569 bytes took 2.5 GB."""
    arrow, parquet = pyarrow_module("pyarrow"), pyarrow_module("pyarrow.parquet")
    path, n_rows, n_chars = tmp_path / "in.parquet", 100, 2_000_000
    parquet.write_table(arrow.table({"prompt": ["x" * n_chars] * n_rows}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    tracemalloc.start()
    try:
        assert len(list(map(type, read_records(path, take_fingerprint(path), FinishedRows(), 1000)))) == n_rows
        assert tracemalloc.get_traced_memory()[1] < 40 * n_chars
    finally:
        tracemalloc.stop()


def test_a_column_of_maps_has_objects(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    metadata = arrow.array([{"user": "a"}, None], arrow.map_(arrow.string(), arrow.string()))
    parquet.write_table(arrow.table({"prompt": ["x", "y"], "metadata": metadata}), path)
    records = [record for _, record in read_records(path, take_fingerprint(path), FinishedRows(), 1000)]
    assert records == [{"prompt": "x", "metadata": {"user": "a"}}, {"prompt": "y", "metadata": None}]


def _write_table(path: Path, records: list[dict[str, Any]]) -> None:
    if path.suffix == ".csv":
        lines = ["id,prompt,max_tokens,note", *(",".join(str(value) for value in row.values()) for row in records)]
        path.write_text("\n".join(lines) + "\n")
        return
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(records), path)


def _read_table(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    table: list[dict[str, Any]] = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    return table
