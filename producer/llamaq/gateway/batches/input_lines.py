"""Splits the blocks of an input file into lines, and decodes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.gateway.http.errors import RequestRefused
from llamaq.gateway.http.json_body import decode_object


async def read_lines(blocks: AsyncIterator[bytes], max_line_bytes: int) -> AsyncIterator[tuple[int, bytes | None]]:
    """Yield the number of each line that is not empty, from 1 on, and the line. None: it is too long.

    Args:
        blocks: The content of the file.
        max_line_bytes: Longest line. At most this number of bytes of a longer line, and one block, are in memory.
    """
    number, rest, is_too_long = 1, b"", False
    async for block in blocks:
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if is_too_long or len(line) > max_line_bytes:
                yield number, None
            elif line.strip():
                yield number, line
            number, is_too_long = number + 1, False
        if len(rest) > max_line_bytes:
            rest, is_too_long = b"", True
    if is_too_long:
        yield number, None
    elif rest.strip():
        yield number, rest


def decode_record(line: bytes) -> dict[str, Any] | InvalidRequest:
    """Return the decoded JSON object of a line, or the error of an endpoint for this body."""
    try:
        return decode_object(line, "the line")
    except (RequestRefused, InvalidRequest) as exc:
        return InvalidRequest(str(exc))
