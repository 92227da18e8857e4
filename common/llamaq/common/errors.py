"""Every error that llamaq raises on purpose, as one tree.

LlamaqError
├── InvalidRequest        a parameter of a job is not valid (also a ValueError)
├── InvalidSettings       a setting, flag or environment variable is not valid (also a ValueError)
├── QueueFull             `max_queue` jobs wait; the job was not submitted
├── QueueDraining         the queue is draining (`llamaq drain`); the job was not submitted
├── OtherKindOfQueue      the workers of the queue run jobs of another kind; nothing was submitted (also a ValueError)
├── RedisFull             Redis has reached `maxmemory`; the job was not submitted
├── IdempotencyConflict   the idempotency key belongs to a job with another request; nothing was submitted
├── BatchIncomplete       some jobs of `submit_many` were not submitted
├── BulkRunRefused        a bulk run cannot begin or continue: its files are of another run (also a ValueError)
│   └── BulkRunBusy       another process executes the bulk run
├── BulkRunIncomplete     a bulk run of an RQ worker has stopped before its end
├── RequestFailed         a request of `map` failed; the cause is the error
├── NotDurable            too few replicas of Redis confirmed the submit in time; the job was submitted
├── NoWorker              no worker serves the queue
├── ResultTimeout         the timeout of a call was over before the job ended (also a TimeoutError)
├── JobNotFound           the job does not exist, or its result has expired (also a KeyError)
├── DeadLetterNotFound    the dead letter does not exist (also a KeyError)
├── SlotCommandRefused    a worker did not execute a slot command
│   └── WorkerEnded       the worker ended before it replied to a command
├── JobFailed             the job ended with an error
├── JobCancelled          only in `llamaq serve`: an operator or another client cancelled the job of a request
├── JobRejected           only inside a worker: this job cannot run, and fails with the given code
├── ProtocolError         bytes in Redis cannot be decoded
├── MissingExtra          an optional dependency is not installed (also an ImportError)
├── ModelError            the model file cannot be found, downloaded or loaded
├── EngineError           llama.cpp refused a call
└── EmbeddedRedisError    the embedded redis-server cannot start
"""

from __future__ import annotations

import math
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Self

MAX_RETRY_AFTER_S = 600
"""Upper bound of `QueueFull.retry_after_s`: after this time, the length of the queue may have changed completely."""


class ErrorCode(StrEnum):
    """Why a job failed. It is the `code` of `JobFailed` and of a `failed` event."""

    INVALID_REQUEST = "invalid_request"
    """The request cannot be decoded, or a parameter is out of its bounds."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt is so long that the context of one job on this worker has no room for an output."""
    INVALID_TOKEN = "invalid_token"
    """A token id, in the prompt or in an option such as `logit_bias`, is not in the vocabulary of the model."""
    INVALID_GRAMMAR = "invalid_grammar"
    """The grammar or JSON schema does not compile, is too large, or takes too long."""
    GRAMMAR_EXHAUSTED = "grammar_exhausted"
    """The grammar allows no token of this vocabulary after the output so far."""
    CHAT_TEMPLATE = "chat_template"
    """The model has no chat template, or the template refuses these messages."""
    DECODE_FAILED = "decode_failed"
    """llama.cpp could not decode the tokens of this job, even without other jobs."""
    POISON = "poison"
    """`max_crashes` workers in a row died with this job. It is now a dead letter (`llamaq dead`)."""
    DAMAGED = "damaged"
    """Another client of Redis overwrote or deleted data of the job. It is now a dead letter (`llamaq dead`)."""
    OTHER_MODEL = "other_model"
    """Another model generated the first tokens, and a worker with `--other-model restart` took the job."""
    INTERNAL = "internal"
    """A defect of the worker. The log of the worker contains the traceback."""


class LlamaqError(Exception):
    """Base class of every error that llamaq raises on purpose. Errors can be pickled and copied."""

    http_status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
    """The HTTP status of a web backend's answer: 400, 404 or 409 if the caller can correct the request, 503 or
    504 if a later request may succeed, 410 if the job was cancelled, otherwise 500 or 502."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python calls the class with `args` to copy an exception. The arguments of our constructors are not `args`.
        return _copy_error, (type(self), self.args, self.__dict__.copy())

    @classmethod
    def _of_parts(cls, args: tuple[Any, ...], attributes: dict[str, Any]) -> Self:
        error = cls.__new__(cls, *args)
        built_in: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
        built_in.__init__(error, *args)
        error.__dict__.update(attributes)
        return error


def _copy_error(kind: type[LlamaqError], args: tuple[Any, ...], attributes: dict[str, Any]) -> LlamaqError:
    """Return an error of this class with these parts. Pickled errors name this function."""
    return kind._of_parts(args, attributes)


class InvalidRequest(LlamaqError, ValueError):
    """A parameter of a job is not valid. The message names the field."""

    http_status = HTTPStatus.BAD_REQUEST


class InvalidSettings(LlamaqError, ValueError):
    """A setting is not valid. The message names the flag and the environment variable."""


class QueueFull(LlamaqError):
    """The queue has as many waiting jobs as its workers allow. The job was not submitted.

    Attributes:
        queue: Name of the queue.
        depth: Number of waiting jobs.
        max_queue: Number of waiting jobs that the workers allow (`--max-queue`).
        estimated_wait_s: Estimated time in seconds that one more job would wait for its start. None: too few jobs
            ended lately for an estimate.
    """

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, queue: str, depth: int, max_queue: int, estimated_wait_s: float | None = None) -> None:
        wait = "" if estimated_wait_s is None else f"; one more would wait about {estimated_wait_s:.3g} s"
        bound = f"{depth} jobs wait and its workers allow {max_queue} (--max-queue)"
        super().__init__(f"queue {queue!r} is full: {bound}{wait}")
        self.queue = queue
        self.depth = depth
        self.max_queue = max_queue
        self.estimated_wait_s = estimated_wait_s

    @property
    def retry_after_s(self) -> int:
        """Whole seconds after which a client should try again, for the HTTP header `Retry-After`: from 1 to 600."""
        return min(max(math.ceil(self.estimated_wait_s or 1), 1), MAX_RETRY_AFTER_S)


class QueueDraining(LlamaqError):
    """The queue accepts no jobs until `resume`. Its workers still run the jobs in the queue. The job was not submitted.

    Attributes:
        queue: Name of the queue.
    """

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"queue {queue!r} is draining, and no job was submitted: it accepts jobs again after: "
            f"llamaq resume --queue {queue}"
        )
        self.queue = queue


class OtherKindOfQueue(LlamaqError, ValueError):
    """The workers of the queue run jobs of another kind. The job was not submitted.

    Attributes:
        queue: Name of the queue.
        queue_kind: What its jobs compute: `generation`, `embedding` or `reranking`.
        kind: What the job would compute.
    """

    http_status = HTTPStatus.NOT_IMPLEMENTED

    def __init__(self, queue: str, queue_kind: str, kind: str) -> None:
        start = {
            "generation": "without --embeddings",
            "embedding": "with --embeddings",
            "reranking": "with --embeddings --pooling rank and a model for reranking",
        }
        super().__init__(
            f"queue {queue!r} is for {queue_kind} jobs, and this is a job for {kind}: use a queue whose worker was "
            f"started {start.get(kind, 'for such jobs')}"
        )
        self.queue = queue
        self.queue_kind = queue_kind
        self.kind = kind


class RedisFull(LlamaqError):
    """Redis has reached its `maxmemory`. The job was not submitted; running jobs continue when memory is free again.

    Attributes:
        queue: Name of the queue.
    """

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"Redis is full, and no job was submitted to queue {queue!r}: give Redis more memory (maxmemory), store "
            "results for a shorter time (result_ttl_s), or bound the queue (--max-queue)"
        )
        self.queue = queue


class IdempotencyConflict(LlamaqError):
    """The idempotency key belongs to a job with another request. The job was not submitted.

    Attributes:
        job_id: Id of the job that has the key.
    """

    http_status = HTTPStatus.CONFLICT

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"job {job_id} has the same idempotency_key and another request: use another key for another request"
        )
        self.job_id = job_id


class BatchIncomplete(LlamaqError):
    """Some jobs of `submit_many` were not submitted. The other jobs were submitted, and run.

    Attributes:
        job_ids: For each job of the batch, in order: its id, or None if it was not submitted.
        errors: For each job of the batch, in order: why it was not submitted, such as `QueueFull`, or None.
    """

    def __init__(self, job_ids: tuple[str | None, ...], errors: tuple[Exception | None, ...]) -> None:
        refused = [(place, error) for place, error in enumerate(errors) if error is not None]
        place, first = refused[0]
        super().__init__(
            f"{len(refused)} of {len(errors)} jobs were not submitted (`errors`), the others were (`job_ids`). "
            f"The first is jobs[{place}]: {first}"
        )
        self.job_ids = job_ids
        self.errors = errors


class BulkRunRefused(LlamaqError, ValueError):
    """A bulk run cannot begin or continue. The message names the file, and says what to do."""

    http_status = HTTPStatus.BAD_REQUEST


class BulkRunBusy(BulkRunRefused):
    """Another process executes the bulk run, and holds the locks of its files."""

    http_status = HTTPStatus.CONFLICT


class BulkRunIncomplete(LlamaqError):
    """A bulk run has stopped before its end: at its deadline, or because too many rows have failed."""


class RequestFailed(LlamaqError):
    """A request of `map` failed.

    Attributes:
        index: Position of the request among the requests, from 0 on.
        error: Why it failed, such as `InvalidRequest` or `JobFailed`.
    """

    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(f"requests[{index}]: {error}")
        self.index = index
        self.error = error


class NotDurable(LlamaqError):
    """Too few replicas of Redis confirmed a submit with `durable` in time. The job was submitted, and runs.

    Attributes:
        job_ids: Ids of the submitted jobs.
        confirmed: Number of replicas that confirmed.
        durable: Number of replicas that the caller asked for.
    """

    def __init__(self, job_ids: tuple[str, ...], confirmed: int, durable: int) -> None:
        jobs = f"job {job_ids[0]} was" if len(job_ids) == 1 else f"job {job_ids[0]} and {len(job_ids) - 1} more were"
        super().__init__(
            f"{jobs} submitted, but {confirmed} of {durable} replicas of Redis confirmed it in time: if Redis fails "
            "over now, a replica may not have it. Do not submit it again: wait for it or cancel it by its id"
        )
        self.job_ids = job_ids
        self.confirmed = confirmed
        self.durable = durable

    @property
    def job_id(self) -> str:
        """Id of the job, or of the first job of a batch."""
        return self.job_ids[0]


class NoWorker(LlamaqError):
    """No worker serves the queue, so its model is unknown and no job runs.

    Attributes:
        queue: Name of the queue.
    """

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, queue: str, host: str | None = None) -> None:
        """Build the message. `host` is given if only the workers of that host were considered."""
        missing = "no worker" if host is None else f"no worker on this host ({host})"
        super().__init__(f"{missing} serves queue {queue!r}; start one with: llamaq worker --queue {queue}")
        self.queue = queue


class ResultTimeout(LlamaqError, TimeoutError):
    """The timeout of a call was over before the job ended. The message says what the call waited for.

    Attributes:
        job_id: Id of the job, which may still run. None: the call concerns no job.
    """

    http_status = HTTPStatus.GATEWAY_TIMEOUT

    def __init__(self, message: str, job_id: str | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobNotFound(LlamaqError, KeyError):
    """The job does not exist, or its result is older than `result_ttl_s`.

    Attributes:
        job_id: The requested id.
    """

    http_status = HTTPStatus.NOT_FOUND

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return f"no job {self.job_id!r}: the id is wrong, its result has expired (result_ttl_s), or Redis has lost it"


class DeadLetterNotFound(LlamaqError, KeyError):
    """The dead letter does not exist: it was retried or purged, or newer dead letters replaced it.

    Attributes:
        letter_id: The requested id.
    """

    def __init__(self, letter_id: str) -> None:
        super().__init__(letter_id)
        self.letter_id = letter_id

    def __str__(self) -> str:
        return f"no dead letter {self.letter_id!r}: the id is wrong, or it was retried or purged"


class SlotCommandRefused(LlamaqError):
    """A worker did not execute a slot command. The message gives the reason."""


class WorkerEnded(SlotCommandRefused):
    """A worker ended, or its heartbeat stopped, before it replied to a command."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE


_CODES_OF_REQUESTS = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.PROMPT_TOO_LONG,
        ErrorCode.INVALID_TOKEN,
        ErrorCode.INVALID_GRAMMAR,
        ErrorCode.GRAMMAR_EXHAUSTED,
        ErrorCode.CHAT_TEMPLATE,
    }
)
"""Codes of failures whose cause is the request. The same request fails again."""


class JobFailed(LlamaqError):
    """The job ended with an error. Other jobs are not affected.

    Attributes:
        code: Kind of the error, a value of `ErrorCode`.
        message: The error in words.
        job_id: Id of the job. None: not known.
        http_status: 400 if the cause is the request, otherwise 502.
    """

    http_status = HTTPStatus.BAD_GATEWAY

    def __init__(self, code: str, message: str, job_id: str | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.job_id = job_id
        if code in _CODES_OF_REQUESTS:
            self.http_status = HTTPStatus.BAD_REQUEST


class JobCancelled(LlamaqError):
    """An operator or another client cancelled the job of an HTTP request. Python clients get its result instead.

    The status is not one of those after which HTTP clients send a request again: the cancelled jobs would come back.
    """

    http_status = HTTPStatus.GONE

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} was cancelled, by an operator (llamaq cancel, llamaq purge) or another client")
        self.job_id = job_id


class JobRejected(LlamaqError):
    r"""Only inside a worker: one job cannot run. It fails with this code and message, other jobs continue.

    Attributes:
        code: Kind of the error.
        message: The error in words. Half a surrogate pair in it is escaped, such as `\ud83d`, because it cannot be
            encoded. JSON in the request may contain one, and a chat template may refuse it.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class ProtocolError(LlamaqError):
    """Bytes in Redis cannot be decoded as the expected message, or are larger than the limit."""


class MissingExtra(LlamaqError, ImportError):
    """An optional dependency is not installed.

    Attributes:
        extra: Name of the extra of llamaq that installs the dependency.
    """

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional dependency: pip install 'llamaq[{extra}]'")
        self.extra = extra


class ModelError(LlamaqError):
    """The model file cannot be found, downloaded or loaded."""


class EngineError(LlamaqError):
    """llama.cpp refused a call that should have worked."""


class EmbeddedRedisError(LlamaqError):
    """The embedded redis-server cannot be found or cannot start."""
