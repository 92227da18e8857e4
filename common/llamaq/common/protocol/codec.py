"""Encodes messages as msgpack and decodes them. No other module of llamaq uses msgpack, and nothing is unpickled.

The size of all data from Redis is checked before the data are decoded.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import msgpack
from pydantic import BaseModel, ValidationError

from llamaq.common.bounded_zlib import decompress
from llamaq.common.errors import InvalidRequest, ProtocolError
from llamaq.common.protocol.embedding_task import Embedding
from llamaq.common.protocol.job_events import EVENT, Event, PromptProgress, TokenSpan
from llamaq.common.protocol.job_outcome import JobStats, TokenLogprobs
from llamaq.common.protocol.job_request import SLICE_TOKENS, JobRequest
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.common.protocol.queue_and_worker_state import RecentJob, Worker
from llamaq.common.protocol.sampling import MAX_TOKEN_ID
from llamaq.common.protocol.slot_commands import SlotCommand, SlotReply
from llamaq.common.protocol.text_commands import TextCommand, TextReply
from llamaq.common.protocol.wire_model import parts_of

M = TypeVar("M", bound=BaseModel)

# Limit of an event or an output. Only workers write them, so the limit only protects against corrupt data.
MAX_EVENT_BYTES = 64 * 1024 * 1024

# Level of zlib. Higher levels take several times as long, and make the result only about 10 % smaller.
OUTPUT_COMPRESSION = 1
SHORT_BYTES = 4096
"""Up to this size, data are compressed with a window of this size."""
SHORT_MEMORY_LEVEL = 5
MAX_PLACE_CHARS = 80
"""Longest name of a field in an error. The path to a value within nested values would be longer than the rest."""

# Parameters that do not determine the output of a job, and the seed, which is random unless the caller sets it. Two
# requests that differ only in these parameters count as the same request.
NOT_IN_DIGEST = frozenset({
    "seed", "has_random_seed", "metadata", "idempotency_key", "priority", "stream", "prompt_progress",
    "cancel_on_disconnect", "timeout_s", "generation_timeout_s", "queue_timeout_s", "deadline_s", "delay_s", "run_at",
    "retries", "slot", "cache_prompt", "cache_salt", "cache_public", "tenant", "traceparent", "draft_max",
})  # fmt: skip


def _pack(value: object) -> bytes:
    return cast(bytes, msgpack.packb(value, use_bin_type=True))


def _unpack(data: bytes, limit: int, *, use_list: bool = True) -> Any:
    """Return the plain values in msgpack bytes. Raises `ProtocolError`. Without `use_list`, lists become tuples: the
    garbage collector skips those of numbers.
    """
    if len(data) > limit:
        raise ProtocolError(f"{len(data)} bytes are more than the allowed {limit}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=use_list)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as exc:
        raise ProtocolError(f"not msgpack: {exc or type(exc).__name__}") from exc


def _compress(data: bytes) -> bytes:
    """Return compressed bytes. A window of the size of short data compresses as well as the default window of 32 KiB,
    whose memory of 256 KiB takes 60 us to allocate.
    """
    if len(data) > SHORT_BYTES:
        return zlib.compress(data, OUTPUT_COMPRESSION)
    deflater = zlib.compressobj(OUTPUT_COMPRESSION, zlib.DEFLATED, SHORT_BYTES.bit_length() - 1, SHORT_MEMORY_LEVEL)
    return deflater.compress(data) + deflater.flush()


def encode_values(values: Sequence[object]) -> bytes:
    """Return a list as one argument of a script. Bytes become strings: msgpack in Redis has no binary type."""
    return cast(bytes, msgpack.packb(values, use_bin_type=False))


def explain(exc: ValidationError) -> str:
    """Return a validation error as one line that names each field, without the input, which may be private."""
    problems = []
    errors = exc.errors(include_input=False, include_url=False, include_context=False)
    for error in errors:
        if error["type"] == "too_short" and any(_is_within(other["loc"], error["loc"]) for other in errors):
            continue  # it counts the valid items alone
        place = _shorten(".".join(str(part) for part in error["loc"]))
        message = error["msg"].removeprefix("Value error, ")
        problems.append(f"{place}: {message}" if place else message)
    return "; ".join(problems[:8])


def _is_within(place: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    """Return whether an error is about a part of the value at `outer`."""
    return len(place) > len(outer) and place[: len(outer)] == outer


def _shorten(place: str) -> str:
    return place if len(place) <= MAX_PLACE_CHARS else f"{place[:MAX_PLACE_CHARS]}..."


def build_model(model: type[M], values: Mapping[str, Any]) -> M:
    """Return a validated model. Raises `InvalidRequest`, which names the invalid fields."""
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        raise InvalidRequest(explain(exc)) from exc


def build_request(values: dict[str, Any]) -> JobRequest:
    """Return a validated request. Raises `InvalidRequest`, which names the invalid fields."""
    parts_of({**values, "tokens": None})
    return build_model(JobRequest, values)


def encode_request(request: JobRequest, max_bytes: int) -> bytes:
    """Return an encoded request. Raises `InvalidRequest` if it is larger than `max_bytes` or contains invalid text."""
    values = request.model_dump(mode="python", exclude_defaults=True, exclude={"tokens"})
    return _encode_within(max_bytes, "request", values, request.tokens)


def check_input(command: TextCommand, max_bytes: int) -> None:
    """Raise `InvalidRequest` if the encoded command is larger than `max_bytes` or contains invalid text."""
    _encode_within(max_bytes, "input", command.model_dump(mode="python", exclude_none=True))


def _encode_within(max_bytes: int, what: str, values: dict[str, Any], tokens: tuple[int, ...] | None = None) -> bytes:
    try:
        data = _pack_with_tokens(values, tokens)
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"a text of the {what} is not valid Unicode: {exc.reason}") from exc
    except (ValueError, OverflowError, TypeError) as exc:
        raise InvalidRequest(f"{_shorten('.'.join(_path_to_unencodable(values)))}: {exc}") from exc
    if len(data) > max_bytes:
        raise InvalidRequest(f"the {what} has {len(data)} bytes, more than max_request_bytes={max_bytes}")
    return data


def _path_to_unencodable(values: object) -> list[str]:
    """Return the names of the nested maps that contain the first value that msgpack cannot encode."""
    for name, value in values.items() if isinstance(values, dict) else ():
        try:
            _pack(value)
        except (ValueError, OverflowError, TypeError):
            return [str(name), *_path_to_unencodable(value)]
    return []


def _pack_with_tokens(values: dict[str, Any], tokens: tuple[int, ...] | None) -> bytes:
    """Return the encoded map with one more key, `tokens`, unless `tokens` is None.

    The tokens are encoded in slices: each slice takes about a millisecond, and between two of them another thread may
    run. This matters for a client that encodes a long prompt in a thread.
    """
    if tokens is None:
        return _pack(values)
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
        parts.append(_pack(part)[header:])
    return b"".join(parts)


def decode_request(data: bytes, max_bytes: int) -> JobRequest:
    """Return the request in these bytes. Raises `InvalidRequest` if they are too large or not a request."""
    try:
        values = _unpack(data, max_bytes)
    except ProtocolError as exc:
        raise InvalidRequest(f"the request cannot be decoded: {exc}") from exc
    if not isinstance(values, dict):
        raise InvalidRequest("the request is not a map of parameters")
    return build_request(values)


def digest_of(request: JobRequest) -> str:
    """Return a digest of the parameters that determine the output of a job, without the seed."""
    values = request.model_dump(mode="json", exclude={*NOT_IN_DIGEST, "tokens"}, exclude_defaults=True)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    digest.update(array("I", request.tokens or ()).tobytes())  # a prompt may have a million tokens
    return digest.hexdigest()[:32]


def encode_returned(request: JobRequest) -> bytes:
    """Return the encoded parameters that the result of a job contains."""
    return _pack({"seed": request.seed, "metadata": request.metadata})


def decode_returned(data: bytes) -> tuple[int, dict[str, Any]]:
    """Return seed and metadata from the encoded parameters that the result contains. Raises `ProtocolError`."""
    values = _unpack(data, MAX_EVENT_BYTES)
    try:
        return int(values["seed"] or 0), dict(values["metadata"])
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise ProtocolError("not the returned parameters of a job") from exc


def encode_event(event: Event) -> bytes:
    """Return an encoded event."""
    return _pack(event.model_dump())


def encode_tokens(
    offset: int,
    tokens: Sequence[int],
    text_offset: int,
    text: str,
    logprobs: Sequence[TokenLogprobs] = (),
    draws: Sequence[float] = (),
    tag_offsets: Sequence[int] = (),
    prompt_logprobs: PromptLogprobs | None = None,
) -> bytes:
    """Return an encoded `tokens` event.

    It is encoded without a pydantic model, because a worker encodes a `tokens` event for each job in each tick.
    """
    values: dict[str, Any] = {"type": "tokens", "offset": offset, "tokens": tokens}
    values |= {"text_offset": text_offset, "text": text}
    if logprobs:
        values["logprobs"] = logprobs
    if draws:
        values["draws"] = draws
    if tag_offsets:
        values["tag_offsets"] = tag_offsets
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = prompt_logprobs.packed()
    return _pack(values)


def decode_event(data: bytes) -> Event:
    """Return the event in these bytes. Raises `ProtocolError`."""
    return _validate_event(_unpack(data, MAX_EVENT_BYTES))


def _validate_event(values: object) -> Event:
    try:
        return EVENT.validate_python(values)
    except ValidationError as exc:
        raise ProtocolError(f"not an event: {explain(exc)}") from exc


def decode_streamed(data: bytes) -> Event | TokenSpan:
    """Return the event in these bytes, as `decode_event` does, but return a `tokens` event as a tuple.

    Raises:
        ProtocolError: The bytes are not an event.
    """
    values = _unpack(data, MAX_EVENT_BYTES, use_list=False)
    if type(values) is dict and values.get("type") == "tokens":
        return _token_span(values)
    return _validate_event(values)


def _token_span(values: dict[Any, Any]) -> TokenSpan:
    """Return the content of a `tokens` event. The checks are those of the model `Tokens`."""
    offset, tokens, text_offset, text = map(values.get, ("offset", "tokens", "text_offset", "text"))
    if not (type(offset) is int and type(text_offset) is int and offset >= 0 and text_offset >= 0):
        raise ProtocolError("not an event: offset or text_offset is not a natural number")
    if not (type(text) is str and type(tokens) is tuple):
        raise ProtocolError("not an event: tokens is not a list, or text is not a string")
    for token in tokens:
        if not (type(token) is int and 0 <= token <= MAX_TOKEN_ID):
            raise ProtocolError("not an event: tokens contains a value that is not a token id")
    logprobs, draws = _logprobs(values, len(tokens)), _draws(values, len(tokens))
    tag_offsets = _tag_offsets(values) if "tag_offsets" in values else ()
    prompt_logprobs = _prompt_logprobs(values) if "prompt_logprobs" in values else None
    return TokenSpan(offset, tokens, text_offset, text, logprobs, draws, tag_offsets, prompt_logprobs)


def _logprobs(values: dict[Any, Any], n_tokens: int) -> tuple[TokenLogprobs, ...]:
    """Return the optional logprobs of an event or an output. Raises `ProtocolError`."""
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


def _draws(values: dict[Any, Any], n_tokens: int) -> tuple[float, ...]:
    """Return the optional probabilities of the draws of an event. Raises `ProtocolError`."""
    found = values.get("draws")
    if not found:
        return ()
    if type(found) is not tuple or len(found) != n_tokens or not all(type(each) is float for each in found):
        raise ProtocolError("not an event: draws is not a list with a number for each token")
    return found


def _tag_offsets(values: dict[Any, Any]) -> tuple[int, ...]:
    """Return the optional offsets of tags of an event or an output. Raises `ProtocolError`."""
    found = values.get("tag_offsets")
    if not found:
        return ()
    if type(found) is not tuple or not all(type(each) is int and each >= 0 for each in found):
        raise ProtocolError("tag_offsets is not a list of natural numbers")
    if any(second <= first for first, second in pairwise(found)):
        raise ProtocolError("tag_offsets does not ascend")
    return found


def _prompt_logprobs(values: dict[Any, Any]) -> PromptLogprobs | None:
    """Return the optional probabilities of the prompt of an event or an output. Raises `ProtocolError`."""
    found = values.get("prompt_logprobs")
    if found is None:
        return None
    try:
        return PromptLogprobs.unpack(found)
    except ValueError as exc:
        raise ProtocolError(str(exc)) from exc


_TOKENS_PREFIX = encode_tokens(0, (), 0, "")[:13]


def is_tokens_event(data: bytes) -> bool:
    """Return whether these bytes are certainly a `tokens` event, without decoding them. False: they may be any
    event.
    """
    return data.startswith(_TOKENS_PREFIX)


_PROGRESS_PREFIX = encode_event(PromptProgress(total_tokens=0, cached_tokens=0, processed_tokens=0, time_ms=0))[:22]


def is_prompt_progress(data: bytes) -> bool:
    """Return whether these bytes are surely an event `prompt_progress`, without decoding them."""
    return data.startswith(_PROGRESS_PREFIX)


def encode_output(
    text: str,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs] = (),
    tag_offsets: Sequence[int] = (),
    prompt_logprobs: PromptLogprobs | None = None,
) -> bytes:
    """Return the encoded output of a job, as it is stored in the hash of the job: msgpack, compressed with zlib.

    Probabilities of a prompt are not compressed: that would take 90 ms of a worker's I/O thread, which writes all
    streams, and make them only 15 % smaller.
    """
    packed = () if prompt_logprobs is None else prompt_logprobs.packed()
    optional: dict[str, Sequence[object]] = {
        "logprobs": logprobs, "tag_offsets": tag_offsets, "prompt_logprobs": packed,
    }  # fmt: skip
    values = {"text": text, "tokens": tokens} | {name: value for name, value in optional.items() if value}
    return _compress(_pack(values)) if prompt_logprobs is None else zlib.compress(_pack(values), 0)


def _unpack_output(data: bytes) -> Any:
    return _unpack(decompress(data, MAX_EVENT_BYTES, "the output of the job"), MAX_EVENT_BYTES, use_list=False)


def decode_output(data: bytes) -> TokenSpan:
    """Return the whole output of a job from its encoded form. Raises `ProtocolError`."""
    values = _unpack_output(data)
    try:
        tokens = tuple(int(token) for token in values["tokens"])
        logprobs, tag_offsets = _logprobs(values, len(tokens)), _tag_offsets(values)
        prompt_logprobs = _prompt_logprobs(values)
        text = str(values["text"])
        return TokenSpan(0, tokens, 0, text, logprobs, tag_offsets=tag_offsets, prompt_logprobs=prompt_logprobs)
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise ProtocolError("not a job's output") from exc


def encode_embeddings(embeddings: Sequence[Embedding]) -> bytes:
    """Return the encoded output of an embedding job, in the form of `encode_output` but not compressed: compression
    would not make these numbers smaller.
    """
    return zlib.compress(_pack({"text": "", "tokens": (), "embeddings": embeddings}), 0)


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


def encode_model(model: JobStats | RecentJob | Worker | SlotCommand | SlotReply | TextCommand | TextReply) -> bytes:
    """Return an encoded model. Fields that are None are omitted."""
    return _pack(model.model_dump(mode="json", exclude_none=True))


def decode_model(kind: type[M], data: bytes, max_bytes: int = MAX_EVENT_BYTES) -> M:
    """Return the model of this class in these bytes. Raises `ProtocolError`."""
    try:
        return kind.model_validate(_unpack(data, max_bytes))
    except ValidationError as exc:
        raise ProtocolError(f"not a {kind.__name__}: {explain(exc)}") from exc


def decode_json(kind: type[M], text: bytes | None) -> M | None:
    """Return the model of this class in a JSON text. None: there is no text, or another client has damaged it."""
    try:
        return None if text is None else kind.model_validate_json(text)
    except ValidationError:
        return None
