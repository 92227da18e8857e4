"""Probabilities in the answers of rows, and answers whose form has no place for what their row asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result, TokenLogprobs
from llamaq.producer.bulk.input_row import read_row
from llamaq.producer.bulk.output_lines import answer_line
from llamaq.producer.bulk.run_description import RunParameters
from llamaq.producer.bulk.table_writer import write_table

BATCH_LINE = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x"}}


async def test_a_plain_answer_has_the_logprobs_in_the_form_of_a_result(tmp_path: Path) -> None:
    """They were computed and then dropped."""
    run = RunParameters(run_id="r", options={"logprobs": 1})
    row = await read_row(run, 1, {"prompt": "x"})
    result = Result(
        job_id="j",
        text="ab",
        tokens=(42, 7),
        logprobs=(TokenLogprobs(-0.5, ((42, -0.5),)), TokenLogprobs(-2.0, ((8, -1.0),))),
        finish_reason=FinishReason.STOP,
        stats=JobStats(),
        seed=1,
    )
    line = await answer_line(run, row, [result], queue="q", now_s=1)
    answer, whole = json.loads(line), json.loads(result.model_dump_json())
    assert answer["logprobs"] == whole["logprobs"] == [[-0.5, [[42, -0.5]]], [-2.0, [[8, -1.0]]]]
    assert answer["tokens"] == [42, 7]
    (tmp_path / "rows.jsonl").write_bytes(line)
    write_table(tmp_path / "rows.jsonl", tmp_path / "out.csv")
    assert '"[[-0.5, [[42, -0.5]]], [-2.0, [[8, -1.0]]]]"' in (tmp_path / "out.csv").read_text()


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
async def test_a_batch_line_refuses_probabilities_that_the_run_asks_for(name: str) -> None:
    row = await read_row(RunParameters(options={name: 2}), 1, BATCH_LINE)
    assert str(row.error).startswith(f"{name}: the form openai has no place for it")
    assert (await read_row(RunParameters(options={name: 2}, form="plain"), 1, BATCH_LINE)).error is None


@pytest.mark.parametrize(
    "values", [{"embed": {"inputs": ["x"]}}, {"prompt": "x", "prompt_logprobs": 0}, {"prompt": "x", "logprobs": 0}]
)
async def test_a_plain_row_fails_whose_answer_in_the_form_openai_would_lose_its_output(values: dict[str, Any]) -> None:
    """A row with texts to embed was answered with an empty text, and its vectors were lost."""
    row = await read_row(RunParameters(form="openai"), 1, values)
    assert "the form openai has no place for it; leave it out, or use plain" in str(row.error)
    assert (await read_row(RunParameters(), 1, values)).error is None
