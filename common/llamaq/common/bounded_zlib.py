"""Decompresses data of other processes, and never more of it than a limit."""

from __future__ import annotations

import zlib

from llamaq.common.errors import ProtocolError


def decompress(data: bytes, limit: int, name: str) -> bytes:
    """Return the decompressed bytes.

    Args:
        data: The compressed bytes.
        limit: Largest number of bytes that `data` may have when decompressed.
        name: What `data` is, for the message of an error.

    Raises:
        ProtocolError: The bytes do not decompress, or are larger than the limit.
    """
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, limit)
    except zlib.error as exc:
        raise ProtocolError(f"{name} does not decompress: {exc}") from exc
    if not inflater.eof:
        raise ProtocolError(f"{name} is truncated, or larger than {limit} bytes")
    return plain
