"""Builds the output line of a row, and finds the row of a line that was written before."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from llamaq.common.errors import BulkRunRefused, JobFailed, LlamaqError
from llamaq.common.protocol.job_outcome import FinishReason, Result
from llamaq.producer.bulk.input_row import Row
from llamaq.producer.bulk.run_description import RunParameters
from llamaq.producer.openai_format.response_body import completion_object, error_object, usage_object

_LINE_START = re.compile(rb'\{"(?:line": (\d{1,18})(?:, "run_id": "([\w-]+)")?|id": "batch_req_([\w-]+)_(\d{1,18})"),')
"""The beginning of each line that this module builds."""
_STARTS = b'\n{"line": \n{"id": "b'
"""The first bytes of these lines, each after a newline."""

_INCOMPLETE = {
    FinishReason.CANCELLED: "the job was cancelled",
    FinishReason.DEADLINE: "the job reached its timeout_s, queue_timeout_s or deadline_s",
}


def error_of(outcome: Result | Exception) -> LlamaqError | None:
    """Return why a row has failed. None: its job has a complete result.

    Raises:
        Exception: The outcome is an error that the row has not caused.
    """
    if isinstance(outcome, Result):
        reason = _INCOMPLETE.get(outcome.finish_reason)
        return None if reason is None else JobFailed(outcome.finish_reason.value, reason, outcome.job_id)
    if isinstance(outcome, LlamaqError):
        return outcome
    raise outcome


async def answer_line(run: RunParameters, row: Row, results: Sequence[Result], *, queue: str, now_s: int) -> bytes:
    """Return the output line of a row with results.

    Args:
        run: The run.
        row: The row.
        results: The result of each of its jobs.
        queue: The queue, whose name stands for the model if the row names none.
        now_s: The time in seconds since the epoch.

    Raises:
        LlamaqError: The answer needs a worker, and none has replied; or the results do not fit the request.
    """
    result = results[0]
    if row.form == "openai":
        if row.body_of is not None:
            body = await row.body_of(results)
        else:
            body = completion_object(row.endpoint, result, model=row.model or queue, created_s=now_s)
        response = {"status_code": int(HTTPStatus.OK), "request_id": result.job_id, "body": body}
        line = {**_batch_start(run, row), "response": response, "error": None}
        if isinstance(body, bytes):
            response["body"] = None
            return _encode(line).replace(b'"body": null', b'"body": ' + body, 1)
        if result.prompt_logprobs is None:
            return _encode(line)
        return await asyncio.to_thread(_encode_in_steps, line)  # takes seconds for the longest prompts
    answer: dict[str, Any] = {"line": row.number, "id": row.row_id, "text": result.text}
    if result.logprobs is not None:
        answer["logprobs"] = result.logprobs
    if "tokens" in row.jobs[0] or "logprobs" in answer:
        answer["tokens"] = result.tokens
    if result.embeddings is not None:
        answer["embeddings"] = [each.vectors if each.n_rows > 1 else each.vector for each in result.embeddings]
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = result.prompt_logprobs.as_json()
    answer |= {"finish_reason": result.finish_reason.value, "usage": usage_object(result.stats), "seed": result.seed}
    if result.metadata:
        answer["metadata"] = result.metadata
    return _encode(answer)


def error_line(run: RunParameters, row: Row, error: LlamaqError) -> bytes:
    """Return the line of the error file for a row that has failed."""
    described = error_object(error)
    place, _, reason = described["message"].partition(": ")
    if place != f"line {row.number}":
        if not isinstance(error, JobFailed):  # the submit has refused the request
            described["message"] = f"line {row.number}: {described['message']}"
    elif described["param"] is not None:  # the parameter comes after the line
        described["param"] = reason.partition(":")[0] if ":" in reason else None
    message = {"code": described["code"] or "invalid_request", "message": described["message"]}
    if row.form == "plain":
        own = {"code": error.code} if isinstance(error, JobFailed) else {}
        return _encode({"line": row.number, "run_id": run.run_id, "id": row.row_id, "error": message | own})
    job_id = error.job_id if isinstance(error, JobFailed) else None
    response = {"status_code": int(error.http_status), "request_id": job_id, "body": {"error": described}}
    return _encode({**_batch_start(run, row), "response": response, "error": {**message, "line": row.number}})


def unfinished_line(run: RunParameters, row: Row, code: str, message: str) -> bytes:
    """Return the line of the error file for a row that was not computed, in the form of the Batch API."""
    return _encode({**_batch_start(run, row), "response": None, "error": {"code": code, "message": message}})


def _batch_start(run: RunParameters, row: Row) -> dict[str, Any]:
    return {"id": f"batch_req_{run.run_id}_{row.number}", "custom_id": row.row_id}


def _encode(line: dict[str, Any]) -> bytes:
    """Return the line as JSON. Raises `ValueError` for a number that JSON does not have, such as NaN."""
    return json.dumps(line, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace") + b"\n"


def _encode_in_steps(line: dict[str, Any]) -> bytes:
    """Do the same as `_encode`, also for iterators. Other threads run meanwhile, unlike during `json.dumps`."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=list)
    return "".join(encoder.iterencode(line)).encode(errors="backslashreplace") + b"\n"


def is_torn(line: bytes) -> bool:
    """Return whether a crash has cut off this line. It may end with zero bytes."""
    return not line.endswith(b"\n") and b"\n" + line.rstrip(b"\0")[:9] in _STARTS


def row_number_of(line: bytes, file_name: object, highest: int | None = None, run_id: str | None = None) -> int:
    """Return the row number of a line that `answer_line` or `error_line` built.

    Args:
        line: The line.
        file_name: The file of the line, for the error.
        highest: The largest number that the input can have. None: it was checked before.
        run_id: The run that may have written the line. None: it was checked before.

    Raises:
        BulkRunRefused: This is no such line, or it names another run.
    """
    found = _LINE_START.match(line)
    number = 0 if found is None else int(found[1] or found[4])
    if found is None or number < 1 or (highest is not None and number > highest):
        raise BulkRunRefused(f"{file_name} has lines that no bulk run wrote: name another output file, or delete it")
    owner = found[2] or found[3]  # plain answers name none
    if run_id and owner and owner.decode() != run_id:
        raise BulkRunRefused(f"{file_name} has rows of run {owner.decode()}: name another file (--errors)")
    return number
