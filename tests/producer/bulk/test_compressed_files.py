"""Compressed input and output files of bulk runs, also damaged ones."""

from __future__ import annotations

import asyncio
import csv
import gzip
import io
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.bulk_runs import EXPECTED, Rows, served_client, texts

from llamaq.common.errors import BulkRunRefused, InvalidRequest, MissingExtra
from llamaq.producer.bulk import BulkProgress, BulkState, described_file, execute, execution, input_file
from llamaq.producer.bulk.compression import compressing, compression_of, decompressed
from llamaq.producer.bulk.input_file import FinishedRows, read_records, take_fingerprint
from llamaq.producer.bulk.output_files import open_output

MIB = 2**20


def write(path: Path, content: bytes) -> Path:
    """Write a compressed file. The suffix of its name tells how."""
    with compressing(path, compression_of(path)) as file:
        file.write(content)
    return path


def read(path: Path) -> bytes:
    with decompressed(path.open("rb", buffering=0), compression_of(path), 1000) as content:
        return content.read()


def compress(rows: Rows, suffix: str) -> Path:
    """Compress the input of a run."""
    return write(rows.input.with_name(rows.input.name + suffix), rows.input.read_bytes())


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
async def test_a_run_of_a_compressed_file_is_continued_and_compresses_its_output_at_the_end(
    redis_url: str, queue: str, rows: Rows, monkeypatch: pytest.MonkeyPatch, suffix: str, name: str
) -> None:
    run = rows.with_fields(input=compress(rows, suffix), output=rows.output.with_name(name + suffix), ordered=True)
    stop = asyncio.Event()

    def stop_after_first_row(progress: BulkProgress) -> None:
        if progress.rows_done:
            stop.set()

    monkeypatch.setattr(execution, "REPORT_S", 0.0)
    async with served_client(redis_url, queue) as (client, answers):
        slow = run.model_copy(update={"rate": 50.0, "window": 1})
        stopped = await execute(slow, client, on_progress=stop_after_first_row, stop=stop)
        assert stopped.state is BulkState.STOPPED
        assert not run.output.exists()
        done = await execute(run, client)
        assert (done.state, done.rows_done, done.rows_total) == (BulkState.COMPLETED, 30, 30)
        assert 0 < stopped.rows_done < 30
        assert len(answers.prompts) >= 30
    content = read(run.output).decode()
    if name == "out.jsonl":
        assert texts([json.loads(line) for line in content.splitlines()]) == EXPECTED
    else:
        assert len(content.splitlines()) == 31
    assert run.error_file.name == f"{run.output.name}.errors.jsonl"
    assert not list(run.output.parent.glob("*.new"))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_all_members_of_a_file_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.jsonl{suffix}"
    parts = [write(tmp_path / f"{number}{suffix}", b'{"prompt": "x"}\n').read_bytes() for number in range(3)]
    path.write_bytes(b"".join(parts))
    fingerprint = take_fingerprint(path)
    assert fingerprint.n_rows == 3
    assert fingerprint.describes(path.stat())
    assert len(list(read_records(path, fingerprint, FinishedRows(), 1000))) == 3


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"garbage",
        lambda data: data[:50] + bytes(8) + data[58:],
        lambda data: b'{"prompt": "x"}\n',
        lambda data: b"",
    ],
    ids=["half", "without the last byte", "garbage behind it", "changed", "not compressed", "empty"],
)
def test_a_damaged_file_is_refused_before_the_run(
    rows: Rows, suffix: str, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = compress(rows, suffix)
    path.write_bytes(damage(path.read_bytes()))
    before = sorted(tmp_path.iterdir())
    with (
        pytest.raises(BulkRunRefused, match=r"in.jsonl\S+ cannot be read: it(s \w+ data is damaged| is empty)"),
        open_output(rows.with_fields(input=path)),
    ):
        pass
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_without_its_suffix_is_refused(rows: Rows, suffix: str) -> None:
    compress(rows, suffix).rename(rows.input)
    with (
        pytest.raises(BulkRunRefused, match=f"its content is compressed, so its name must end with {suffix}"),
        open_output(rows.run),
    ):
        pass


def test_other_compressed_files_are_refused(rows: Rows, tmp_path: Path) -> None:
    for name in ("in.parquet.gz", "in.gz", "in.jsonl.bz2"):
        path = rows.input.rename(tmp_path / name)
        with (
            pytest.raises(BulkRunRefused, match=r"\.gz or \.zst may follow"),
            open_output(rows.with_fields(input=path)),
        ):
            pass
        path.rename(rows.input)
    with pytest.raises(ValueError, match="errors: this file cannot be compressed"):
        rows.with_fields(errors=tmp_path / "errors.jsonl.gz")


@pytest.mark.parametrize("change", [lambda data: data[:-40], lambda data: data + b"garbage", lambda data: b"x" + data])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_changed_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes], suffix: str
) -> None:
    monkeypatch.setattr(described_file, "READ_BYTES", 64)
    lines = b"".join(b'{"prompt": "%d"}\n' % (number * 7919**9 % 10**30) for number in range(20_000))
    path = write(tmp_path / f"in.jsonl{suffix}", lines)
    fingerprint = take_fingerprint(path)
    records = read_records(path, fingerprint, FinishedRows(), 1000)
    next(records)
    data = path.read_bytes()
    path.write_bytes(change(data))
    if change(data).startswith(data):  # bytes that were appended are not read
        assert len(list(records)) == 19_999
    else:
        with pytest.raises(described_file.InputChanged):
            list(records)


def test_a_zst_file_without_a_library_names_the_extra(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compress(rows, ".zst")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    for fields in ({"input": path}, {"output": rows.output.with_name("out.jsonl.zst")}):
        with (
            pytest.raises(MissingExtra, match=r"pip install 'llamaq\[parquet\]'"),
            open_output(rows.with_fields(**fields)),
        ):
            pass


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst", "in.csv.gz", "in.csv.zst"])
def test_a_decompression_bomb_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(input_file, "MAX_ROW_CHARS", MIB)
    path = tmp_path / name
    with compressing(path, compression_of(path)) as file:
        file.write(b"prompt\n" if ".csv" in name else b'{"prompt": "first"}\n')
        for _ in range(100):
            file.write(b"x" * MIB)
        file.write(b'\n"last"\n' if ".csv" in name else b'\n{"prompt": "last"}\n')
    assert path.stat().st_size < MIB
    tracemalloc.start()
    try:
        if ".csv" in name:
            with pytest.raises(csv.Error, match=f"begins at line 2: it is longer than {MIB} characters"):
                take_fingerprint(path)
        else:
            fingerprint = take_fingerprint(path)
            records = [record for _, record in read_records(path, fingerprint, FinishedRows(), 4 * MIB)]
            assert [isinstance(record, InvalidRequest) for record in records] == [False, True, False]
        assert tracemalloc.get_traced_memory()[1] < 30 * MIB
    finally:
        tracemalloc.stop()


def test_row_numbers_may_be_larger_than_the_compressed_file(rows: Rows) -> None:
    """The number of a row is that of its line, and blank lines compress to almost nothing."""
    content = b"\n" * 100_000 + b'{"prompt": "x"}\n'
    path = write(rows.input.with_name("in.jsonl.gz"), content)
    run = rows.with_fields(input=path)
    with open_output(run) as files:
        files.add_answer(100_001, b'{"line": 100001, "id": null}\n')
        files.complete()
    with open_output(run) as files:
        assert len(files.finished) == 1


def test_the_same_content_is_compressed_to_the_same_bytes(tmp_path: Path) -> None:
    written = [write(tmp_path / f"{number}.gz", b"x" * 1000).read_bytes() for number in range(2)]
    assert written[0] == written[1]
    assert gzip.GzipFile(fileobj=io.BytesIO(written[0])).read() == b"x" * 1000
