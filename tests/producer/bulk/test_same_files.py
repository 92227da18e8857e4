"""A bulk run refuses one file under two names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamaq.producer.bulk import BulkRun


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    (tmp_path / "folder").mkdir()
    return path


def test_the_same_file_under_other_names_is_refused(source: Path) -> None:
    folder = source.parent
    hard, soft, output = folder / "hard.jsonl", folder / "soft.jsonl", folder / "out.jsonl"
    os.link(source, hard)
    soft.symlink_to(output)  # the output does not exist yet
    detour = folder / "folder" / ".."
    for files in (
        {"output": hard},
        {"output": detour / "in.jsonl"},
        {"output": output, "errors": detour / "in.jsonl"},
        {"output": output, "errors": hard},
        {"output": output, "errors": soft},
        {"output": output, "errors": detour / "out.jsonl"},
    ):
        with pytest.raises(ValueError, match="three different files"):
            BulkRun(input=source, **files)


def test_files_that_the_run_itself_writes_are_refused_under_other_names(source: Path) -> None:
    detour = source.parent / "folder" / ".."
    for output, own in (("out.csv", "out.csv.rows.jsonl"), ("out.jsonl", "out.jsonl.run.json")):
        with pytest.raises(ValueError, match="the run itself writes"):
            BulkRun(input=source, output=source.parent / output, errors=detour / own)
