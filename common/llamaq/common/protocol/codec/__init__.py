"""Encodes and decodes what is stored in Redis: requests, events, outputs and snapshots. Nothing is unpickled.

All of it is msgpack, which only `packing` uses. The size of data from Redis is checked before the data are decoded.
"""

from __future__ import annotations

from llamaq.common.protocol.codec.events import (
    decode_event,
    decode_streamed,
    encode_event,
    encode_tokens,
    is_prompt_progress,
    is_tokens_event,
)
from llamaq.common.protocol.codec.models import build_model, decode_json, decode_model, encode_model, explain
from llamaq.common.protocol.codec.outputs import (
    decode_embeddings,
    decode_output,
    encode_embeddings,
    encode_output,
)
from llamaq.common.protocol.codec.packing import MAX_EVENT_BYTES, encode_values
from llamaq.common.protocol.codec.requests import (
    build_request,
    check_input,
    decode_request,
    decode_returned,
    digest_of,
    encode_request,
    encode_returned,
)

__all__ = [
    "MAX_EVENT_BYTES",
    "build_model",
    "build_request",
    "check_input",
    "decode_embeddings",
    "decode_event",
    "decode_json",
    "decode_model",
    "decode_output",
    "decode_request",
    "decode_returned",
    "decode_streamed",
    "digest_of",
    "encode_embeddings",
    "encode_event",
    "encode_model",
    "encode_output",
    "encode_request",
    "encode_returned",
    "encode_tokens",
    "encode_values",
    "explain",
    "is_prompt_progress",
    "is_tokens_event",
]
