"""Rows with texts to embed, in llamaq's own form."""

from __future__ import annotations

import json
from array import array

from llamaq.common.protocol.embedding_task import Embedding
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.producer.bulk.input_row import read_row
from llamaq.producer.bulk.output_lines import answer_line
from llamaq.producer.bulk.run_description import RunParameters


async def test_a_row_with_texts_to_embed_is_answered_with_their_vectors() -> None:
    run = RunParameters(run_id="r")
    row = await read_row(run, 3, {"id": "a", "embed": {"inputs": ["hello", [1, 2]]}})
    assert row.error is None
    assert row.jobs == [{"embed": {"inputs": ["hello", [1, 2]]}}]
    rows = array("f", [0.5, -1.0, 2.0, 4.0]).tobytes()
    result = Result(
        job_id="j",
        text="",
        tokens=(),
        embeddings=(Embedding(1, 1, rows), Embedding(2, 2, rows)),
        finish_reason=FinishReason.STOP,
        stats=JobStats(prompt_tokens=3, mode="embed"),
        seed=1,
    )
    line = json.loads(await answer_line(run, row, [result], queue="q", now_s=1))
    assert (line["line"], line["id"], line["usage"]["prompt_tokens"]) == (3, "a", 3)
    assert line["embeddings"] == [[0.5, -1.0, 2.0, 4.0], [[0.5, -1.0], [2.0, 4.0]]]
