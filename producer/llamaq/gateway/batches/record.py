"""What is stored about a batch, and how the API shows it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field

from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.wire_model import WireModel
from llamaq.gateway.http.errors import RequestRefused, not_found
from llamaq.gateway.keys.key_record import KeyRecord

TOKEN_COUNTERS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


class BatchStatus(StrEnum):
    """The states of a batch, as OpenAI's API names them."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        """Whether the batch changes no more."""
        return self in (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


class BatchEndpoint(StrEnum):
    """The endpoints that the lines of a batch may be for. The value is the path of the URL."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    EMBEDDINGS = "/v1/embeddings"

    @property
    def kind(self) -> JobKind:
        """What the jobs of the lines compute."""
        return JobKind.EMBEDDING if self is BatchEndpoint.EMBEDDINGS else JobKind.GENERATION


class BatchRequest(WireModel):
    """The request for a batch. It does not change."""

    id: str = Field(description="The id.")
    key: KeyRecord | None = Field(
        None, description="The API key at the time of the request. All servers apply it. None: no key is required."
    )
    is_revocable: bool = Field(
        False, description="Whether the key is in Redis. Then every server notices when it is revoked."
    )
    queue: str = Field(description="The queue of lines without `model`.")
    endpoint: BatchEndpoint = Field(description="The endpoint that all lines are for.")
    input_file_id: str = Field(description="The file with the requests.")
    completion_window: str = Field(description="Longest duration, such as `24h`.")
    created_ms: int = Field(description="Time of the request, in milliseconds since the epoch.")
    expires_s: int = Field(description="Time when the batch ends if it is not complete, in seconds since the epoch.")
    max_tokens: int | None = Field(
        None, description="Largest number of generated tokens of a line without `max_tokens`. None: no limit."
    )
    output_ttl_s: int = Field(description="How long the output is stored, in seconds.")
    metadata: dict[str, str] = Field(default_factory=dict, description="Metadata of the client, which answers contain.")

    @property
    def owner(self) -> str | None:
        """Name of the API key. None: the server requires none."""
        return None if self.key is None else self.key.name

    @property
    def output_file_id(self) -> str:
        """The id of the file with the answers. It belongs to the same node of a cluster as the batch."""
        return f"file-{self.id.removeprefix('batch_')}-output"

    @property
    def error_file_id(self) -> str:
        """The id of the file with the lines that failed."""
        return f"file-{self.id.removeprefix('batch_')}-errors"


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that was read from Redis."""

    request: BatchRequest
    fields: Mapping[str, str]
    """The fields of the hash that change."""

    @property
    def status(self) -> BatchStatus:
        """The state of the batch."""
        return BatchStatus(self.fields["status"])

    @property
    def is_over(self) -> bool:
        """Whether the completion window has ended."""
        return time.time() >= self.request.expires_s

    def number(self, name: str) -> int:
        """Return a counter or a time. 0: it is not set."""
        return int(self.fields.get(name, "0"))


def batch_object(batch: Batch) -> dict[str, Any]:
    """Return the object `batch` of OpenAI's API."""
    request = batch.request
    errors = batch.fields.get("errors")
    ends = {f"{status}_at": batch.number(f"{status}_at") or None for status in BatchStatus if status != "validating"}
    return {
        "id": request.id,
        "object": "batch",
        "endpoint": request.endpoint,
        "model": batch.fields.get("model"),
        "errors": None if errors is None else {"object": "list", "data": json.loads(errors)},
        "input_file_id": request.input_file_id,
        "completion_window": request.completion_window,
        "status": batch.status,
        "output_file_id": batch.fields.get("output_file_id"),
        "error_file_id": batch.fields.get("error_file_id"),
        "created_at": request.created_ms // 1000,
        "expires_at": request.expires_s,
        **ends,
        "request_counts": {name: batch.number(name) for name in ("total", "completed", "failed")},
        "usage": _usage(batch),
        "metadata": request.metadata,
    }


def _usage(batch: Batch) -> dict[str, Any]:
    prompt, cached, generated, n_reasoning = (batch.number(name) for name in TOKEN_COUNTERS)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": n_reasoning},
        "total_tokens": prompt + generated,
    }


def missing_batch(batch_id: str) -> RequestRefused:
    """Return the error for an unknown batch."""
    return not_found(f"there is no batch {batch_id[:100]!r}: the id is wrong, or it has ended long ago")
