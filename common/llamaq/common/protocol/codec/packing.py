"""Packs plain values as msgpack, and unpacks them. No other module of llamaq imports msgpack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgpack

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol.job_request import SLICE_TOKENS

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""Limit of an event or an output. Only workers write them, so the limit only protects against corrupt data."""


def pack(value: object) -> bytes:
    """Return a plain value as msgpack."""
    return cast(bytes, msgpack.packb(value, use_bin_type=True))


def unpack(data: bytes, limit: int, *, use_list: bool = True) -> Any:
    """Return the plain value in msgpack bytes.

    Args:
        data: The bytes.
        limit: Largest number of bytes that are unpacked.
        use_list: False: lists become tuples. The garbage collector skips those of numbers.

    Raises:
        ProtocolError: The bytes are too many, or not msgpack.
    """
    if len(data) > limit:
        raise ProtocolError(f"{len(data)} bytes are more than the allowed {limit}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=use_list)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as exc:
        raise ProtocolError(f"not msgpack: {exc or type(exc).__name__}") from exc


def pack_with_tokens(values: dict[str, Any], tokens: tuple[int, ...] | None) -> bytes:
    """Return the packed map with one more key, `tokens`, unless `tokens` is None.

    The tokens are packed in slices: each slice takes about a millisecond, and between two of them another thread may
    run. This matters for a client that encodes a long prompt in a thread.
    """
    if tokens is None:
        return pack(values)
    packer = msgpack.Packer(use_bin_type=True, autoreset=False)
    packer.pack_map_header(len(values) + 1)
    for name, value in values.items():
        packer.pack(name)
        packer.pack(value)
    packer.pack("tokens")
    packer.pack_array_header(len(tokens))
    parts = [packer.bytes()]
    for start in range(0, len(tokens), SLICE_TOKENS):
        part = tokens[start : start + SLICE_TOKENS]
        header = 1 if len(part) < 16 else 3  # bytes of msgpack's header of a list
        parts.append(pack(part)[header:])
    return b"".join(parts)


def encode_values(values: Sequence[object]) -> bytes:
    """Return a list as one argument of a script. Bytes become strings: msgpack in Redis has no binary type."""
    return cast(bytes, msgpack.packb(values, use_bin_type=False))
