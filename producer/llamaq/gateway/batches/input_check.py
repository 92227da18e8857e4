"""Checks the input of a batch before anything is computed: each line must be a request for the endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.gateway.batches.input_lines import decode_record, read_lines
from llamaq.gateway.batches.record import BatchEndpoint

MAX_LINES = 200_000
MAX_ERRORS = 50
LINES_PER_YIELD = 50
"""After this many lines, other tasks of the event loop run."""


@dataclass(slots=True)
class CheckedInput:
    """What the check has found."""

    n_lines: int = 0
    """Number of lines that are not empty."""
    last_line: int = 0
    """Number of the last line that is not empty. Empty lines are counted too."""
    model: str | None = None
    """The `model` of all lines. None: they name none."""
    has_model: bool = False
    """Whether a valid line has set `model`. Lines with an error may come before it."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Why the batch is refused, in the form of OpenAI's API. Empty: it is not."""

    def refuse(self, code: str, message: str, *, line: int | None = None, param: str | None = None) -> None:
        """Add an error."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"code": code, "message": message, "line": line, "param": param})


async def check_input(blocks: AsyncIterator[bytes], endpoint: BatchEndpoint, max_line_bytes: int) -> CheckedInput:
    """Check all lines. Wrong job options are not errors of the batch: such a line fails alone.

    Args:
        blocks: The content of the file.
        endpoint: The endpoint of the batch.
        max_line_bytes: Longest line.
    """
    found = CheckedInput()
    ids: set[int] = set()
    async for number, line in read_lines(blocks, max_line_bytes):
        found.n_lines, found.last_line = found.n_lines + 1, number
        if found.n_lines > MAX_LINES:
            found.refuse("too_many_requests", f"the file has more than {MAX_LINES} lines: divide it", line=number)
            break
        record = None if line is None else decode_record(line)
        if record is None:
            found.refuse("line_too_long", f"the line is longer than {max_line_bytes} bytes", line=number)
        elif isinstance(record, InvalidRequest):
            found.refuse("invalid_json_line", str(record), line=number)
        else:
            _check_record(found, ids, number, record, endpoint)
        if found.n_lines % LINES_PER_YIELD == 0:
            await asyncio.sleep(0)
    if not found.n_lines:
        found.refuse("empty_file", "the input file has no lines, or was deleted")
    return found


def _check_record(
    found: CheckedInput, ids: set[int], number: int, record: Mapping[str, Any], endpoint: BatchEndpoint
) -> None:
    custom_id, body = record.get("custom_id"), record.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        found.refuse("missing_required_parameter", "custom_id: a text is required", line=number, param="custom_id")
    elif hash(custom_id) in ids:  # 8 bytes for each line, instead of the text
        found.refuse(
            "duplicate_custom_id", "custom_id: an earlier line has the same one", line=number, param="custom_id"
        )
    if isinstance(custom_id, str):
        ids.add(hash(custom_id))
    if record.get("method", "POST") != "POST":
        found.refuse("invalid_method", "method: only POST is supported", line=number, param="method")
    if record.get("url", endpoint) != endpoint:
        found.refuse("mismatched_url", f"url: the batch is for {endpoint.value}", line=number, param="url")
    if not isinstance(body, Mapping):
        found.refuse("missing_required_parameter", "body: an object is required", line=number, param="body")
        return
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        found.refuse("invalid_model", "body.model: a text is required", line=number, param="body.model")
    elif not found.has_model:
        found.model, found.has_model = model, True
    elif model != found.model:
        found.refuse(
            "mismatched_model", "body.model: all lines of a batch have the same model", line=number, param="body.model"
        )
