"""A run that continues after many finished rows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.support.bulk_runs import Rows

from llamaq.producer.bulk.output_files import open_output
from llamaq.producer.bulk.run_description import BulkRun

N_ROWS = 10_000
PLAIN_ANSWER = '{"line": %d, "id": null}\n'


@pytest.fixture(params=["jsonl", "csv", "parquet"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> BulkRun:
    """A run of which all rows but the last one are finished."""
    path = tmp_path / f"in.{request.param}"
    prompts = [f"p{n}" for n in range(1, N_ROWS + 1)]
    if request.param == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"prompt": prompts}), path)
    elif request.param == "csv":
        path.write_text("\n".join(["prompt", *prompts]))
    else:
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    run = BulkRun(input=path, output=tmp_path / "out.jsonl")
    with open_output(run):
        pass
    run.output.write_text("".join(PLAIN_ANSWER % n for n in range(1, N_ROWS)))
    return run


async def test_other_tasks_run_while_finished_rows_are_skipped(run: BulkRun) -> None:
    """Otherwise Ctrl-C and SIGTERM have no effect meanwhile, and no progress is shown."""
    n_turns = 0

    async def take_turns() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await asyncio.sleep(0)

    with open_output(run) as files:
        turns = asyncio.create_task(take_turns())
        found = [record async for record in files.records(1000)]
        turns.cancel()
    assert found == [(N_ROWS, {"prompt": f"p{N_ROWS}"})]
    assert n_turns >= N_ROWS // 1000


async def test_blank_and_overlong_lines_that_are_finished_are_skipped(tmp_path: Path) -> None:
    rows = Rows(tmp_path, "x" * 200, "", "y" * 200, {"prompt": "last"})
    with open_output(rows.run):
        pass
    rows.output.write_text(PLAIN_ANSWER % 1)
    with open_output(rows.run) as files:
        found = [(number, str(record)) async for number, record in files.records(100)]
    assert found == [(3, "the line is longer than 100 bytes"), (4, "{'prompt': 'last'}")]
