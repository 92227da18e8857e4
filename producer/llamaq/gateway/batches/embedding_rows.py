"""Lines of a batch for /v1/embeddings: one job for each line."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_outcome import Result
from llamaq.gateway.embedding_format import embedding_list, read_embedding_body
from llamaq.gateway.http.errors import RequestRefused
from llamaq.producer.bulk.bulk_run import RunParameters
from llamaq.producer.bulk.row import Row
from llamaq.producer.embeddings import INPUTS_PER_JOB, join_results, split_task
from llamaq.producer.openai_format.request_body import read_model


def read_embedding_row(queue: str, run: RunParameters, number: int, record: object) -> Row:
    """Return the row of a line. If the line is not a request, the row has the error.

    Args:
        queue: The queue, whose name stands for the model if the line names none.
        run: The run of the batch.
        number: The number of the line.
        record: The decoded JSON of the line.
    """
    row = Row(number, form=run.form_of("openai"))
    try:
        if not isinstance(record, Mapping) or not isinstance(record.get("body"), Mapping):
            raise InvalidRequest("body: an object is required")
        row.row_id, row.model = record.get("custom_id"), read_model(record["body"])
        _read_body(row, record["body"], row.model or queue)
    except InvalidRequest as exc:
        row.error = exc
    return row


def _read_body(row: Row, fields: Mapping[str, Any], model: str) -> None:
    try:
        body = read_embedding_body(fields)
    except RequestRefused as exc:
        raise InvalidRequest(str(exc)) from exc
    tasks = split_task(body.inputs, dimensions=body.dimensions, normalization=body.normalization)
    if len(tasks) > 1:
        raise InvalidRequest(f"input: a line of a batch has at most {INPUTS_PER_JOB} texts; divide it")
    (row.values,) = tasks
    row.body_of = partial(_answer, model=model, is_base64=body.is_base64)


def _answer(result: Result, *, model: str, is_base64: bool) -> dict[str, Any]:
    return embedding_list(join_results([result]), model, is_base64=is_base64)
