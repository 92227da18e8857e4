"""Every error that llamaq raises on purpose, as one tree.

LlamaqError
├── InvalidRequest        a job's parameters are not acceptable (also a ValueError)
├── InvalidSettings       a setting, flag or environment variable is not acceptable (also a ValueError)
├── QueueFull             the queue holds `max_queue` waiting jobs; nothing was submitted
├── RedisFull             Redis has reached `maxmemory` and takes nothing more; nothing was submitted
├── NoWorker              nobody serves the queue
├── ResultTimeout         the caller's own patience ran out (also a TimeoutError)
├── JobNotFound           no such job, or its result has expired (also a KeyError)
├── DeadLetterNotFound    no such dead letter: it was retried or purged, perhaps (also a KeyError)
├── OrderRefused          a worker did not do what was asked with a slot; the message says why
├── JobFailed             the job ended with an error of its own: `code`, `message`
├── JobRejected           worker side: this one job cannot be run, with the code it fails with
├── ProtocolError         bytes in Redis that this version does not understand
├── MissingExtra          an optional dependency is needed: `pip install llamaq[...]`
├── ModelError            the model file cannot be found, fetched or loaded
├── EngineError           llama.cpp refused a call
└── EmbeddedRedisError    the bundled redis-server cannot be started
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a job failed; the `code` of `JobFailed` and of a `failed` event."""

    INVALID_REQUEST = "invalid_request"
    """The request does not decode, or a parameter is out of its bounds."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt alone fills the context that one job can have on this worker."""
    INVALID_TOKEN = "invalid_token"
    """A token id, in the prompt or in `logit_bias`, is not in the model's vocabulary."""
    INVALID_GRAMMAR = "invalid_grammar"
    """The grammar or JSON schema does not compile, is too large, or takes too long."""
    GRAMMAR_EXHAUSTED = "grammar_exhausted"
    """The grammar allows no token of this vocabulary at the place that was reached."""
    CHAT_TEMPLATE = "chat_template"
    """The model has no chat template, or it refuses these messages."""
    DECODE_FAILED = "decode_failed"
    """llama.cpp could not decode this job's tokens, also when tried alone."""
    POISON = "poison"
    """Workers died with it, `max_crashes` in a row; it lies in the dead letters (`llamaq dead`)."""
    INTERNAL = "internal"
    """A defect of the worker; its log has the traceback."""


class LlamaqError(Exception):
    """The base of every error that llamaq raises on purpose."""


class InvalidRequest(LlamaqError, ValueError):
    """A job's parameters are not acceptable; the message names the field."""


class InvalidSettings(LlamaqError, ValueError):
    """A setting is not acceptable; the message names the flag and the environment variable."""


class QueueFull(LlamaqError):
    """The queue holds as many waiting jobs as its workers allow (`max_queue`); nothing was submitted.

    `depth` jobs waited. `estimated_wait_s` is about how long one more would have waited for its start; None when too
    few jobs have ended lately to tell.
    """

    def __init__(self, queue: str, depth: int, max_queue: int, estimated_wait_s: float | None = None) -> None:
        wait = "" if estimated_wait_s is None else f"; one more would wait about {estimated_wait_s:.3g} s"
        bound = f"{depth} jobs wait and its workers allow {max_queue} (--max-queue)"
        super().__init__(f"queue {queue!r} is full: {bound}{wait}")
        self.queue = queue
        self.depth = depth
        self.max_queue = max_queue
        self.estimated_wait_s = estimated_wait_s


class RedisFull(LlamaqError):
    """Redis has reached its `maxmemory`; nothing was submitted. Jobs that run wait and go on when there is room."""

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"Redis is full, so nothing was submitted to queue {queue!r}: give it more memory (maxmemory), let results "
            "go sooner (result_ttl_s), or bound the queue (--max-queue)"
        )
        self.queue = queue


class NoWorker(LlamaqError):
    """No worker serves the queue, on `host` if one is named: its model is unknown, and nothing is generated."""

    def __init__(self, queue: str, host: str | None = None) -> None:
        who = "no worker" if host is None else f"no worker on this host ({host})"
        super().__init__(f"{who} serves queue {queue!r}; start one with: llamaq worker --queue {queue}")
        self.queue = queue


class ResultTimeout(LlamaqError, TimeoutError):
    """The caller's own timeout ran out before the job ended."""


class JobNotFound(LlamaqError, KeyError):
    """There is no such job, or its result has outlived `result_ttl_s`."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return f"no job {self.job_id!r}: the id is wrong, or its result has expired (result_ttl_s)"


class DeadLetterNotFound(LlamaqError, KeyError):
    """There is no such dead letter: it was retried or purged, or newer ones have taken its place."""

    def __init__(self, letter_id: str) -> None:
        super().__init__(letter_id)
        self.letter_id = letter_id

    def __str__(self) -> str:
        return f"no dead letter {self.letter_id!r}: the id is wrong, or it was retried or purged"


class SlotCommandRefused(LlamaqError):
    """A worker would not, or could not, do what was asked with one of its slots; the message says why."""


class JobFailed(LlamaqError):
    """The job ended with an error of its own; other jobs are not concerned."""

    def __init__(self, code: str, message: str, job_id: str | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.job_id = job_id


class JobRejected(LlamaqError):
    """Raised inside a worker when one job cannot be run; it fails with this code and message, alone."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class ProtocolError(LlamaqError):
    """Bytes in Redis that do not decode as what they should be, or are larger than is allowed."""


class MissingExtra(LlamaqError, ImportError):
    """An optional dependency is needed for this."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency: pip install 'llamaq[{extra}]'")
        self.extra = extra


class ModelError(LlamaqError):
    """The model file cannot be found, fetched or loaded."""


class EngineError(LlamaqError):
    """llama.cpp refused a call that should have worked."""


class EmbeddedRedisError(LlamaqError):
    """The embedded redis-server cannot be found or does not start."""
