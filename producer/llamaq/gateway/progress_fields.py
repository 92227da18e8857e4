"""The fields that show in a stream how far an answer is: `prompt_progress` and `timings` of llama-server, and vLLM's
`usage` in each chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from llamaq.common.protocol.job_outcome import JobStats
from llamaq.gateway.timings import timings_object
from llamaq.producer import Chunk, PromptProgress
from llamaq.producer.openai_format.request_body import has_usage_in_chunks, read_flag
from llamaq.producer.openai_format.response_body import usage_object


@dataclass(frozen=True, slots=True)
class ProgressOptions:
    """Which of these fields a request asks for."""

    has_progress: bool = False
    """Whether the stream has events about the prompt: `return_progress`, or our own `prompt_progress`."""
    has_timings: bool = False
    """Whether each event has `timings`: `timings_per_token`."""
    has_usage: bool = False
    """Whether each event has `usage`: `stream_options.continuous_usage_stats`."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Return what a body asks for.

        Raises:
            InvalidRequest: A field is not a boolean.
        """
        has_progress = read_flag(body, "return_progress") or read_flag(body, "prompt_progress")
        return cls(has_progress, read_flag(body, "timings_per_token"), has_usage_in_chunks(body))

    def __bool__(self) -> bool:
        return self.has_progress or self.has_timings or self.has_usage


NO_PROGRESS = ProgressOptions()


class ProgressFields:
    """The fields for the events of one job, in their order.

    The times of the prompt are those of the worker. The time of the generated tokens is measured here, from the first
    chunk on, because the stats of the job are known only at its end.
    """

    def __init__(self, options: ProgressOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._prompt: PromptProgress | None = None
        self._n_prompt = 0
        """Number of tokens of the prompt. The progress of a later attempt counts the generated tokens too."""
        self._n_first = 0
        """Number of tokens in the first chunk with tokens."""
        self._n_tokens = 0
        self._first_s = 0.0
        """When the first chunk with tokens arrived."""

    def of(self, chunk: Chunk) -> dict[str, Any] | None:
        """Return the fields for the event of the next chunk. None: the request wants no event for this chunk."""
        fields: dict[str, Any] = {}
        if chunk.progress is not None:
            self._prompt = chunk.progress
            self._n_prompt = self._n_prompt or chunk.progress.total_tokens
            if not self._options.has_progress:
                return None
            fields["prompt_progress"] = progress_object(chunk.progress)
        now_s, n_new = self._clock(), len(chunk.tokens)
        if n_new and not self._n_tokens:
            self._n_first, self._first_s = n_new, now_s
        self._n_tokens += n_new
        if self._options.has_timings:
            fields["timings"] = self._timings(now_s)
        if self._options.has_usage:
            fields["usage"] = self._usage()
        return fields

    def end(self, stats: JobStats) -> dict[str, Any]:
        """Return the fields for the event at the end of the job, besides those that it always has."""
        return {"usage": usage_object(stats)} if self._options.has_usage else {}

    def _usage(self) -> dict[str, Any]:
        """Return the object `usage` of the tokens so far."""
        n_cached = 0 if self._prompt is None else min(self._prompt.cached_tokens, self._n_prompt)
        return usage_object(
            JobStats(prompt_tokens=self._n_prompt, generated_tokens=self._n_tokens, prefix_cache_tokens=n_cached)
        )

    def _timings(self, now_s: float) -> dict[str, Any]:
        """Return the object `timings` of the tokens so far."""
        prompt = self._prompt
        prompt_ms = 0.0 if prompt is None else prompt.time_ms
        n_computed = 0 if prompt is None else prompt.processed_tokens - prompt.cached_tokens
        generated_ms = 1000 * (now_s - self._first_s) if self._n_tokens else 0.0
        stats = JobStats(
            prompt_tokens=0 if prompt is None else prompt.processed_tokens,
            prefix_cache_tokens=0 if prompt is None else prompt.cached_tokens,
            prompt_eval_rate=1000 * n_computed / prompt_ms if prompt_ms else None,
            ttft_ms=prompt_ms,
            duration_ms=prompt_ms + generated_ms,
            generated_tokens=self._n_tokens,
        )
        timings = timings_object(stats, n_first=self._n_first)
        del timings["queue_ms"]  # known only at the end
        return timings


def progress_object(progress: PromptProgress) -> dict[str, Any]:
    """Return the object `prompt_progress` of llama-server."""
    return {
        "total": progress.total_tokens,
        "cache": progress.cached_tokens,
        "processed": progress.processed_tokens,
        "time_ms": round(progress.time_ms),
    }
