"""The progress of one job: its output, how much of it Redis has stored, and what the next flush writes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from llamaq.common.errors import ErrorCode, InvalidRequest, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.embedding_task import Embedding
from llamaq.common.protocol.job_events import Failed, Finished, PromptProgress
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.script_types import Attempt, JobFlush, StoredEnd, TerminalWrite
from llamaq.worker.broker.job_output import JobOutput
from llamaq.worker.broker.outbox_settings import Checkpoints
from llamaq.worker.broker.token_times import TokenTimes
from llamaq.worker.broker.wall_clock_timeline import timeline_of
from llamaq.worker.core.job import Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.core.outputs import JobEnded, NewToken
from llamaq.worker.engine_loop.telemetry import EndedJob
from llamaq.worker.scheduling.finished_job_stats import mode_of

MAX_UNSENT_PROGRESS = 64
"""Largest number of events `prompt_progress` that are kept while Redis is slow. Newer ones replace the oldest."""
RETRYABLE = frozenset({ErrorCode.INTERNAL, ErrorCode.DECODE_FAILED})
"""Codes of failures that may not happen again, so a job with retries is tried again. `decode_failed` can mean that
cells were missing."""


class SlotUse(NamedTuple):
    """Whether an attempt has a slot."""

    has_started: bool = False
    """Whether the attempt has a slot, or had one."""
    has_slot: bool = False
    """Whether the attempt has a slot now."""


@dataclass(slots=True, eq=False)
class StoredState:
    """What Redis has stored of an attempt."""

    n_tokens: int
    """Number of tokens, with those of earlier attempts."""
    changed_s: float = field(default_factory=time.monotonic)
    """When `n_tokens` last changed."""
    slot: SlotUse = field(default_factory=SlotUse)


@dataclass(slots=True, eq=False)
class JobProgress:
    """The output of one attempt, how much of it Redis has stored, and how the job leaves this worker."""

    lease: Lease
    attempt: InitVar[Attempt]
    times: JobTimes
    encoded_request: bytes = field(init=False)
    """The encoded request. Empty once the job is prepared."""
    request: JobRequest | None = field(default=None, init=False)
    """The request. None until the job is prepared."""
    checkpoints: Checkpoints | None = field(default=None, init=False)
    """When tokens are stored. None: every flush stores and publishes all new tokens."""
    cancel_on_disconnect: bool = field(default=False, init=False)
    """Whether the job is cancelled when it has no subscriber."""
    retries_left: int | None = field(init=False)
    """Number of times that the job may be retried after a failure. None: it was submitted without retries."""
    output: JobOutput = field(default_factory=JobOutput, init=False)
    """The output. Empty until the job is prepared, although earlier attempts may have stored tokens."""
    token_times: TokenTimes = field(init=False)
    """When the tokens were generated, over all attempts."""
    slot: SlotUse = field(default_factory=SlotUse, init=False)
    stored: StoredState = field(init=False)
    unsent_progress: tuple[bytes, ...] = field(default=(), init=False)
    """The encoded events `prompt_progress` that are not published yet."""
    subscriber_seen_s: float = field(default_factory=time.monotonic, init=False)
    """When the job last had a subscriber."""
    is_cancelling: bool = field(default=False, init=False)
    """Whether the outbox has asked the engine thread to cancel the job."""
    must_requeue: bool = field(default=False, init=False)
    """Whether the job is requeued for other workers as soon as all its tokens are stored."""
    retried_error: Failed | None = field(default=None, init=False)
    """The failure after which the job is retried later, as soon as all its tokens are stored."""
    terminal_write: TerminalWrite | None = field(default=None, init=False)
    """The terminal event of the job and its fields. None while the job runs."""
    final_text: str = field(default="", init=False)
    """Text that was withheld until the end of the job."""
    stats: JobStats | None = field(default=None, init=False)
    """The stats of the job. None while it runs, and if it did not reach the engine."""

    def __post_init__(self, attempt: Attempt) -> None:
        self.encoded_request, self.retries_left = attempt.request, attempt.retries_left
        self.token_times = TokenTimes.decode(attempt.token_times)
        self.stored = StoredState(attempt.generated)

    # ---- what the engine does with the job

    def prepare(self, prepared: PreparedJob, checkpoints: Checkpoints) -> None:
        """Record that the job is prepared.

        Args:
            prepared: The prepared job.
            checkpoints: When the tokens of a job with `stream=False` are stored.
        """
        job = prepared.job
        self.request, self.encoded_request = job.request, b""
        self.checkpoints = None if job.request.stream else checkpoints
        self.cancel_on_disconnect = job.request.cancel_on_disconnect
        self.times = job.times
        self.output = JobOutput.of_earlier_attempts(prepared)
        self.stored.n_tokens = len(self.output.tokens)

    def add_token(self, new: NewToken) -> None:
        """Add a generated token to the output."""
        self.output.add(new.token, new.text, new.logprobs, new.draw_probability, new.tag_offset, new.withheld)
        since_s = new.time_s if self.times.submitted_s is None else self.times.submitted_s
        self.token_times.add(max(0, int((new.time_s - since_s) * 1000)))

    def add_prompt_progress(self, progress: PromptProgress) -> None:
        """Add an event `prompt_progress`, which the next flush publishes."""
        self.unsent_progress = (*self.unsent_progress, codec.encode_event(progress))[-MAX_UNSENT_PROGRESS:]

    def gain_slot(self) -> None:
        """Record that the job has a slot now."""
        self.slot = SlotUse(has_started=True, has_slot=True)

    def lose_slot(self) -> None:
        """Record that the job was preempted."""
        self.slot = SlotUse(has_started=self.slot.has_started, has_slot=False)

    def ask_cancel(self) -> bool:
        """Record that the job shall be cancelled. Returns False if that was recorded before."""
        is_new, self.is_cancelling = not self.is_cancelling, True
        return is_new

    def ask_requeue(self) -> None:
        """Let the job be requeued as soon as all its tokens are stored."""
        self.must_requeue = True

    # ---- flushes

    @property
    def can_requeue(self) -> bool:
        """Whether the job may be requeued now: all its tokens are stored, so the next worker resumes after them."""
        return self.must_requeue and self.terminal_write is None and self.stored.n_tokens >= len(self.output.tokens)

    def has_news(self, now_s: float) -> bool:
        """Return whether the next flush has something to write for the job."""
        if self.must_requeue or self.unsent_progress or self.stored.slot != self.slot:
            return True
        return len(self.output.tokens) > self.stored.n_tokens and self._is_due(now_s)

    def next_flush(self, now_s: float) -> JobFlush:
        """Return what the next flush writes: the tokens that are due and that Redis has not stored yet."""
        lease, output, offset = self.lease, self.output, self.stored.n_tokens
        n_new = len(output.tokens) - offset
        if n_new < 0 or not self._is_due(now_s):
            n_new = 0  # before the preparation, the output has no tokens of earlier attempts
        payload = b""
        # The terminal write of a job with `stream=False` contains the whole output, so no tokens event is needed.
        has_text = bool(self.final_text) and offset <= len(output.tokens)  # more are stored only if Redis is damaged
        if (n_new or has_text) and not (self.checkpoints and self.terminal_write):
            payload = output.encode_from(offset, self.final_text)
        has_started, has_slot = self.slot
        return JobFlush(
            lease.job_id,
            lease.attempt,
            lease.stream,
            lease.entry_id,
            offset,
            n_new,
            payload,
            publish=self.checkpoints is None,
            has_started=has_started,
            has_slot=has_slot,
            slot_ms=int(self.times.slot_s * 1000),
            token_times=self.token_times.encode() if payload else "",
            progress=self.unsent_progress,
            withheld=output.encode_withheld() if payload and self.terminal_write is None else b"",
            is_watched=self.request is None or self.cancel_on_disconnect,
        )

    def _is_due(self, now_s: float) -> bool:
        """Whether the next flush writes the unstored tokens. Otherwise a later checkpoint writes them."""
        if self.checkpoints is None or self.terminal_write or self.must_requeue or not self.slot.has_slot:
            return True  # another worker may continue a job without a slot
        is_old = now_s - self.stored.changed_s >= self.checkpoints.every_s
        return is_old or len(self.output.tokens) - self.stored.n_tokens >= self.checkpoints.tokens

    def drop_progress(self, sent: JobFlush) -> None:
        """Drop the events `prompt_progress` that a flush has published."""
        if sent.progress:
            self.unsent_progress = tuple(event for event in self.unsent_progress if event not in sent.progress)

    def record_flush(self, sent: JobFlush, n_stored: int, now_s: float) -> bool:
        """Record what Redis has stored after a flush. Returns whether it has all tokens that were sent."""
        has_all = n_stored == sent.offset + sent.count
        if has_all:
            self.stored.slot = SlotUse(sent.has_started, sent.has_slot)
        self.set_stored(n_stored, now_s)
        return has_all

    def set_stored(self, n_stored: int, now_s: float) -> None:
        """Record how many tokens Redis has stored."""
        if n_stored != self.stored.n_tokens:
            self.stored.n_tokens, self.stored.changed_s = n_stored, now_s

    # ---- the end of the job

    def plan_retry(self, error: JobRejected) -> bool:
        """Plan a retry if the failure may not happen again and a retry is left. Return whether it was planned."""
        if error.code not in RETRYABLE or not self.retries_left:
            return False
        self.retried_error, self.must_requeue = _failed_event(error), True
        return True

    def fail(self, error: JobRejected, output: Mapping[str, bytes | str] = MappingProxyType({})) -> None:
        """Record the failure of the job, with the fields of its output, which the next flush writes."""
        event, dead_reason = _failed_event(error), ""
        if error.code in RETRYABLE and self.retries_left is not None:
            dead_reason = f"{event.code} after the last retry: {event.message}"
        self.terminal_write = TerminalWrite(event, {"error": codec.encode_event(event), **output}, dead_reason)

    def describe_end(self, worker: str, end: StoredEnd) -> EndedJob:
        """Return the report of this job's end for the telemetry."""
        request = self._read_request()
        stats = self.stats or JobStats(
            generated_tokens=self.stored.n_tokens,
            queue_ms=round(self.times.waited_ms(time.monotonic()), 3),
            worker=worker,
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
        if self.request is not None:
            return self.request
        with suppress(InvalidRequest):
            return codec.decode_request(self.encoded_request, len(self.encoded_request))
        return None

    def end(self, ended: JobEnded) -> None:
        """Record the end of the job, which the next flush writes, unless it will be retried after this failure."""
        if ended.error is not None and self.plan_retry(ended.error):
            return
        self.final_text, self.stats = ended.text, ended.stats
        text = self.output.text() + self.final_text
        output: dict[str, bytes | str] = {
            "output": self._encode_output(text, ended.embeddings),
            "generated": str(len(self.output.tokens)),
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
        return self.output.encode_all(text)


def _usage(stats: JobStats) -> str:
    """Return, for the metrics, the prompt tokens of an ended job: all, computed and reused ones, and their tier."""
    n_cached = stats.prefix_cache_tokens
    tier = "unused" if stats.slot is None else stats.prefix_cache_tier or "none"
    return f"{stats.prompt_tokens} {stats.prompt_tokens - n_cached} {n_cached} {tier}"


def _failed_event(error: JobRejected) -> Failed:
    return Failed(code=error.code.value, message=error.message)
