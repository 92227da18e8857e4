"""The progress of one job: its generated tokens, how many of them Redis has stored, and what the next flush writes."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType

from llamaq.common.errors import ErrorCode, InvalidRequest, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.embedding_task import Embedding
from llamaq.common.protocol.job_events import Failed, Finished, PromptProgress
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.script_types import JobFlush, StoredEnd, TerminalWrite
from llamaq.common.protocol.token_logprobs import TokenLogprobs
from llamaq.worker.broker.token_times import TokenTimes
from llamaq.worker.broker.wall_clock_timeline import timeline_of
from llamaq.worker.core.job import Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.core.outputs import JobEnded
from llamaq.worker.engine_loop.telemetry import EndedJob
from llamaq.worker.scheduling.finished_job_stats import mode_of


@dataclass(frozen=True, slots=True)
class RetryDelay:
    """How long a job that failed waits before it is retried. Each further retry waits twice as long."""

    first_s: float
    """Delay of the first retry in seconds."""
    longest_s: float
    """Upper bound on the delay in seconds."""


MAX_UNSENT_PROGRESS = 64
"""Largest number of events `prompt_progress` that are kept while Redis is slow. Newer ones replace the oldest."""
MAY_PASS = frozenset({ErrorCode.INTERNAL, ErrorCode.DECODE_FAILED})
"""Failures that may not happen again: a job with retries is tried again. `decode_failed` can mean that cells were
missing."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How often the tokens of a job with `stream=False` are stored: after `tokens` tokens or `every_s` seconds."""

    tokens: int
    """Generated tokens between two checkpoints."""
    every_s: float
    """Seconds between two checkpoints."""


@dataclass(slots=True, eq=False)
class JobProgress:
    """The generated tokens of one attempt, and how many of them Redis has stored."""

    lease: Lease
    checkpoints: Checkpoints | None
    """When tokens are stored. None: every flush stores and publishes all new tokens."""
    cancel_on_disconnect: bool
    """Whether the job is cancelled when it has no subscriber."""
    n_stored: int
    """Tokens that Redis has stored."""
    times: JobTimes = field(default_factory=JobTimes)
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """For each token, the text that the token completed. It may be empty."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For each token, its probabilities. Empty if the job did not ask for them."""
    draws: list[float] = field(default_factory=list)
    """For each token, its probability in the draw. Empty if the sampler does not depend on it."""
    tag_offsets: list[int] = field(default_factory=list)
    """Positions in the text, in characters, of the tokens that are tags, in ascending order."""
    text_ends: list[int] = field(default_factory=list)
    """For each token, the number of characters of text up to and including that token."""
    token_times: TokenTimes = field(default_factory=TokenTimes)
    """When the tokens were generated, over all attempts."""
    unsent_progress: tuple[bytes, ...] = ()
    """The encoded events `prompt_progress` that are not published yet."""
    terminal_write: TerminalWrite | None = None
    """The terminal event of the job and its fields. None while the job runs."""
    stats: JobStats | None = None
    final_text: str = ""
    """Text that was withheld until the end of the job."""
    stored_s: float = field(default_factory=time.monotonic)
    """When `n_stored` last changed."""
    subscriber_seen_s: float = field(default_factory=time.monotonic)
    """When the job last had a subscriber."""
    is_cancelling: bool = False
    """Whether the outbox has asked the engine thread to cancel the job."""
    has_started: bool = False
    """Whether the job has a slot, or had one in this attempt."""
    has_slot: bool = False
    """Whether the job has a slot now."""
    stored_slot: tuple[bool, bool] = (False, False)
    """`has_started` and `has_slot` as Redis has stored them."""
    request: JobRequest | bytes = b""
    """The request: encoded until the job is prepared."""
    must_requeue: bool = False
    """Whether the job is requeued for other workers as soon as all its tokens are stored."""
    retries_left: int | None = None
    """Number of times that the job may be retried after a failure. None: it was submitted without retries."""
    retried_error: Failed | None = None
    """The failure after which the job is retried later, as soon as all its tokens are stored."""

    def prepare(self, prepared: PreparedJob, checkpoints: Checkpoints) -> None:
        """Record that the job is prepared.

        Args:
            prepared: The prepared job.
            checkpoints: When the tokens of a job with `stream=False` are stored.
        """
        job = prepared.job
        self.request = job.request
        self.checkpoints = None if job.request.stream else checkpoints
        self.cancel_on_disconnect = job.request.cancel_on_disconnect
        self.times, self.n_stored = job.times, len(job.generated_before)
        self.tokens, self.texts, self.text_ends = [], [], []
        for token, text in zip(job.generated_before, prepared.texts, strict=True):
            self.add(token, text)
        self.logprobs, self.draws = list(prepared.logprobs), list(prepared.draws)
        self.tag_offsets = list(prepared.tag_offsets)

    def add(
        self,
        token: int,
        text: str,
        logprobs: TokenLogprobs | None = None,
        draw_probability: float | None = None,
        tag_offset: int | None = None,
    ) -> None:
        """Add a generated token, the text that the token completed, and what else the job needs of the token."""
        self.tokens.append(token)
        if tag_offset is not None:
            self.tag_offsets.append(tag_offset)
        if draw_probability is not None:
            self.draws.append(draw_probability)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.texts.append(text)
        self.text_ends.append((self.text_ends[-1] if self.text_ends else 0) + len(text))

    def record_time(self, time_s: float) -> None:
        """Record when the last added token was generated, on the clock of `times`."""
        since_s = time_s if self.times.submitted_s is None else self.times.submitted_s
        self.token_times.add(max(0, int((time_s - since_s) * 1000)))

    def add_prompt_progress(self, progress: PromptProgress) -> None:
        """Add an event `prompt_progress`, which the next flush publishes."""
        self.unsent_progress = (*self.unsent_progress, codec.encode_event(progress))[-MAX_UNSENT_PROGRESS:]

    @property
    def can_requeue(self) -> bool:
        """Whether the job may be requeued now: all its tokens are stored, so the next worker resumes after them."""
        return self.must_requeue and self.terminal_write is None and self.n_stored >= len(self.tokens)

    def has_news(self, now_s: float) -> bool:
        """Return whether the next flush has something to write for the job."""
        if self.must_requeue or self.unsent_progress or self.stored_slot != (self.has_started, self.has_slot):
            return True
        return len(self.tokens) > self.n_stored and self._is_due(now_s)

    def next_flush(self, now_s: float) -> JobFlush:
        """Return what the next flush writes: the tokens that are due and that Redis has not stored yet."""
        lease, offset = self.lease, self.n_stored
        tokens = self.tokens[offset:] if self._is_due(now_s) else []
        payload = b""
        # The terminal write of a job with `stream=False` contains the whole output, so no tokens event is needed.
        if (tokens or self.final_text) and not (self.checkpoints and self.terminal_write):
            text_offset = self.text_ends[offset - 1] if offset else 0
            text = "".join(self.texts[offset:]) + self.final_text
            logprobs, draws = (self.logprobs[offset:], self.draws[offset:]) if tokens else ((), ())
            tag_offsets = self._tag_offsets_in(text_offset, text) if self.tag_offsets else ()
            payload = codec.encode_tokens(offset, tokens, text_offset, text, logprobs, draws, tag_offsets)
        return JobFlush(
            lease.job_id,
            lease.attempt,
            lease.stream,
            lease.entry_id,
            offset,
            len(tokens),
            payload,
            publish=self.checkpoints is None,
            has_started=self.has_started,
            has_slot=self.has_slot,
            slot_ms=int(self.times.slot_s * 1000),
            token_times=self.token_times.encode() if payload else "",
            progress=self.unsent_progress,
        )

    def _tag_offsets_in(self, text_offset: int, text: str) -> list[int]:
        """Return the offsets of the tags that begin in this text, which is `text_offset` characters after the start."""
        first = bisect_left(self.tag_offsets, text_offset)
        return self.tag_offsets[first : bisect_left(self.tag_offsets, text_offset + len(text), first)]

    def _is_due(self, now_s: float) -> bool:
        """Whether the next flush writes the unstored tokens. Otherwise a later checkpoint writes them."""
        if self.checkpoints is None or self.terminal_write or self.must_requeue or not self.has_slot:
            return True  # another worker may continue a job without a slot
        is_old = now_s - self.stored_s >= self.checkpoints.every_s
        return is_old or len(self.tokens) - self.n_stored >= self.checkpoints.tokens

    def drop_progress(self, sent: JobFlush) -> None:
        """Drop the events `prompt_progress` that a flush has published."""
        if sent.progress:
            self.unsent_progress = tuple(event for event in self.unsent_progress if event not in sent.progress)

    def set_stored(self, n_stored: int, now_s: float) -> None:
        """Record how many tokens Redis has stored."""
        if n_stored != self.n_stored:
            self.n_stored, self.stored_s = n_stored, now_s

    def retry_after(self, error: JobRejected) -> bool:
        """Plan a retry if the failure may not happen again and a retry is left. Return whether it was planned."""
        if error.code not in MAY_PASS or not self.retries_left:
            return False
        self.retried_error, self.must_requeue = _failed_event(error), True
        return True

    def fail(self, error: JobRejected, output: Mapping[str, bytes | str] = MappingProxyType({})) -> None:
        """Record the failure of the job, with the fields of its output, which the next flush writes."""
        event, dead_reason = _failed_event(error), ""
        if error.code in MAY_PASS and self.retries_left is not None:
            dead_reason = f"{event.code} after the last retry: {event.message}"
        self.terminal_write = TerminalWrite(event, {"error": codec.encode_event(event), **output}, dead_reason)

    def describe_end(self, worker: str, end: StoredEnd) -> EndedJob:
        """Return the report of this job's end for the telemetry."""
        request = self._read_request()
        stats = self.stats or JobStats(
            generated_tokens=self.n_stored, queue_ms=round(self.times.waited_ms(time.monotonic()), 3), worker=worker
        )
        if self.stats is None and request is not None:
            stats = stats.model_copy(update={"mode": mode_of(request), "seed": request.seed})
        return EndedJob(
            self.lease.job_id,
            stats,
            end.finish_reason,
            end.error_code,
            metadata={} if request is None else request.metadata,
            timeline=timeline_of(self.times, self.stats),
            traceparent=None if request is None else request.traceparent,
        )

    def _read_request(self) -> JobRequest | None:
        """Return the request. None: it cannot be decoded."""
        if isinstance(self.request, JobRequest):
            return self.request
        with suppress(InvalidRequest):
            return codec.decode_request(self.request, len(self.request))
        return None

    def end(self, ended: JobEnded) -> None:
        """Record the end of the job, which the next flush writes, unless it will be retried after this failure."""
        if ended.error is not None and self.retry_after(ended.error):
            return
        self.final_text, self.stats = ended.text, ended.stats
        text = "".join(self.texts) + self.final_text
        output: dict[str, bytes | str] = {
            "output": self._encode_output(text, ended.embeddings),
            "generated": str(len(self.tokens)),
            "token_times": self.token_times.encode(),
            "usage": _usage(ended.stats),
        }
        if ended.error is not None:
            self.fail(ended.error, output)
        elif ended.reason is not None:
            event = Finished(finish_reason=ended.reason, stats=ended.stats, text_length=len(text))
            stats = codec.encode_model(ended.stats)
            self.terminal_write = TerminalWrite(event, {"finish_reason": ended.reason.value, "stats": stats, **output})
        else:
            raise ValueError(f"job {self.lease.job_id} ended without a reason")

    def _encode_output(self, text: str, embeddings: tuple[Embedding, ...] | None) -> bytes:
        if embeddings is not None:
            return codec.encode_embeddings(embeddings)
        return codec.encode_output(text, self.tokens, self.logprobs, self._tag_offsets_in(0, text))


def _usage(stats: JobStats) -> str:
    """Return for the metrics how many prompt tokens an ended job has, computed and reused, and the tier."""
    n_cached = min(stats.prefix_cache_tokens, stats.prompt_tokens)
    tier = "unused" if stats.slot is None else stats.prefix_cache_tier or "none"
    return f"{stats.prompt_tokens} {stats.prompt_tokens - n_cached} {n_cached} {tier}"


def _failed_event(error: JobRejected) -> Failed:
    return Failed(code=error.code.value, message=error.message)
