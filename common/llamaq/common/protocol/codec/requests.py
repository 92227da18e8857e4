"""The requests of jobs: encoded, decoded, and compared with each other."""

from __future__ import annotations

import hashlib
import json
from array import array
from typing import Any

from llamaq.common.errors import InvalidRequest, ProtocolError
from llamaq.common.protocol.codec.models import build_model, shorten
from llamaq.common.protocol.codec.packing import MAX_EVENT_BYTES, pack, pack_with_tokens, unpack
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.text_commands import TextCommand
from llamaq.common.protocol.wire_model import check_n_parts

NOT_IN_DIGEST = frozenset({
    "seed", "has_random_seed", "metadata", "idempotency_key", "priority", "stream", "prompt_progress",
    "cancel_on_disconnect", "timeout_s", "generation_timeout_s", "queue_timeout_s", "deadline_s", "delay_s", "run_at",
    "retries", "slot", "cache_prompt", "cache_salt", "cache_public", "tenant", "traceparent", "draft_max",
})  # fmt: skip
"""Parameters that do not determine the output of a job, and the seed, which is random unless the caller sets it. Two
requests that differ only in these parameters count as the same request."""


def build_request(values: dict[str, Any]) -> JobRequest:
    """Return a validated request. Raises `InvalidRequest`, which names the invalid fields."""
    check_n_parts({**values, "tokens": None})
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
        data = pack_with_tokens(values, tokens)
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"a text of the {what} is not valid Unicode: {exc.reason}") from exc
    except (ValueError, OverflowError, TypeError) as exc:
        raise InvalidRequest(f"{shorten('.'.join(_path_to_unencodable(values)))}: {exc}") from exc
    if len(data) > max_bytes:
        raise InvalidRequest(f"the {what} has {len(data)} bytes, more than max_request_bytes={max_bytes}")
    return data


def _path_to_unencodable(values: object) -> list[str]:
    """Return the names of the nested maps that contain the first value that msgpack cannot encode."""
    for name, value in values.items() if isinstance(values, dict) else ():
        try:
            pack(value)
        except (ValueError, OverflowError, TypeError):
            return [str(name), *_path_to_unencodable(value)]
    return []


def decode_request(data: bytes, max_bytes: int) -> JobRequest:
    """Return the request in these bytes. Raises `InvalidRequest` if they are too large or not a request."""
    try:
        values = unpack(data, max_bytes)
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
    return pack({"seed": request.seed, "metadata": request.metadata})


def decode_returned(data: bytes) -> tuple[int, dict[str, Any]]:
    """Return seed and metadata from the encoded parameters that the result contains. Raises `ProtocolError`."""
    values = unpack(data, MAX_EVENT_BYTES)
    try:
        return int(values["seed"] or 0), dict(values["metadata"])
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise ProtocolError("not the returned parameters of a job") from exc
