"""The whole output of a job, in the form in which the hash of the job has it: msgpack, in the format of zlib."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from llamaq.common.bounded_zlib import decompress
from llamaq.common.errors import ProtocolError
from llamaq.common.protocol.codec.packing import MAX_EVENT_BYTES, pack, unpack
from llamaq.common.protocol.embedding_task import Embedding
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs

COMPRESSION_LEVEL = 1
"""Level of zlib. Higher levels take several times as long, and make the result only about 10 % smaller."""
SHORT_BYTES = 4096
"""Up to this size, data are compressed with a window of this size."""
SHORT_MEMORY_LEVEL = 5


def encode_output(
    text: str,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs] = (),
    tag_offsets: Sequence[int] = (),
    prompt_logprobs: PromptLogprobs | None = None,
) -> bytes:
    """Return the encoded output of a job.

    Probabilities of a prompt are not compressed: that would take 90 ms of a worker's I/O thread, which writes all
    streams, and make them only 15 % smaller.
    """
    packed = () if prompt_logprobs is None else prompt_logprobs.packed()
    optional: dict[str, Sequence[object]] = {
        "logprobs": logprobs, "tag_offsets": tag_offsets, "prompt_logprobs": packed,
    }  # fmt: skip
    values = {"text": text, "tokens": tokens} | {name: value for name, value in optional.items() if value}
    return _compress(pack(values)) if prompt_logprobs is None else zlib.compress(pack(values), 0)


def _compress(data: bytes) -> bytes:
    """Return compressed bytes. A window of the size of short data compresses as well as the default window of 32 KiB,
    whose memory of 256 KiB takes 60 us to allocate.
    """
    if len(data) > SHORT_BYTES:
        return zlib.compress(data, COMPRESSION_LEVEL)
    deflater = zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, SHORT_BYTES.bit_length() - 1, SHORT_MEMORY_LEVEL)
    return deflater.compress(data) + deflater.flush()


def decode_output(data: bytes) -> TokenSpan:
    """Return the whole output of a job from its encoded form. Raises `ProtocolError`."""
    values = _unpack_output(data)
    try:
        tokens = tuple(int(token) for token in values["tokens"])
        logprobs, tag_offsets = read_logprobs(values, len(tokens)), read_tag_offsets(values)
        prompt_logprobs = read_prompt_logprobs(values)
        text = str(values["text"])
        return TokenSpan(0, tokens, 0, text, logprobs, tag_offsets=tag_offsets, prompt_logprobs=prompt_logprobs)
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise ProtocolError("not a job's output") from exc


def _unpack_output(data: bytes) -> Any:
    return unpack(decompress(data, MAX_EVENT_BYTES, "the output of the job"), MAX_EVENT_BYTES, use_list=False)


def encode_embeddings(embeddings: Sequence[Embedding]) -> bytes:
    """Return the encoded output of an embedding job, in the form of `encode_output` but not compressed: compression
    would not make these numbers smaller.
    """
    return zlib.compress(pack({"text": "", "tokens": (), "embeddings": embeddings}), 0)


def decode_embeddings(data: bytes) -> tuple[Embedding, ...] | None:
    """Return the embeddings from the encoded output of a job. None: it has none. Raises `ProtocolError`."""
    values = _unpack_output(data)
    if not isinstance(values, dict) or "embeddings" not in values:
        return None
    try:
        found = tuple(
            Embedding(int(n_tokens), int(n_rows), bytes(memoryview(rows)))
            for n_tokens, n_rows, rows in values["embeddings"]
        )
    except (TypeError, ValueError, OverflowError) as exc:
        raise ProtocolError("embeddings is not a list of two numbers and bytes each") from exc
    if any(each.n_rows < 1 or len(each.data) % (4 * each.n_rows) for each in found):
        raise ProtocolError("embeddings: the number of bytes is not that of whole rows")
    return found


# The fields that an output or an event `tokens` has only if its job asked for them. Each function gets the unpacked
# map, returns an empty value if the field is missing, and raises `ProtocolError` if the field is damaged.


def read_logprobs(values: dict[Any, Any], n_tokens: int) -> tuple[TokenLogprobs, ...]:
    """Return the logprobs of each token."""
    found = values.get("logprobs")
    if not found:
        return ()
    try:
        logprobs = tuple(
            TokenLogprobs(float(own), tuple((int(token), float(other)) for token, other in top)) for own, top in found
        )
    except (TypeError, ValueError, OverflowError) as exc:
        raise ProtocolError("logprobs is not a list of pairs of a number and a list") from exc
    if len(logprobs) != n_tokens:
        raise ProtocolError(f"there are {n_tokens} tokens, but logprobs of {len(logprobs)}")
    return logprobs


def read_draws(values: dict[Any, Any], n_tokens: int) -> tuple[float, ...]:
    """Return the probability of each token in its draw. Only events have it."""
    found = values.get("draws")
    if not found:
        return ()
    if type(found) is not tuple or len(found) != n_tokens or not all(type(each) is float for each in found):
        raise ProtocolError("not an event: draws is not a list with a number for each token")
    return found


def read_tag_offsets(values: dict[Any, Any]) -> tuple[int, ...]:
    """Return the positions of the tags in the text."""
    found = values.get("tag_offsets")
    if not found:
        return ()
    if type(found) is not tuple or not all(type(each) is int and each >= 0 for each in found):
        raise ProtocolError("tag_offsets is not a list of natural numbers")
    if any(second <= first for first, second in pairwise(found)):
        raise ProtocolError("tag_offsets does not ascend")
    return found


def read_prompt_logprobs(values: dict[Any, Any]) -> PromptLogprobs | None:
    """Return the probabilities of the prompt's tokens."""
    found = values.get("prompt_logprobs")
    if found is None:
        return None
    try:
        return PromptLogprobs.unpack(found)
    except ValueError as exc:
        raise ProtocolError(str(exc)) from exc
