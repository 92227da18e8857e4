"""One job of a window, from the request to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from llamaq.common.protocol.job_outcome import FinishReason, Result
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer.job_handle import AsyncJob

T = TypeVar("T")

_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


def replacement_key(key: str, n_replaced: int) -> str:
    """Return the idempotency key of the job that is submitted after `n_replaced` jobs of earlier processes."""
    return f"{key}:{n_replaced}" if n_replaced else key


@dataclass(slots=True, eq=False)
class WindowJob(Generic[T]):
    """A request of a window, and its job in the queue."""

    tag: T
    """Identifies the request for the caller of the window."""
    request: JobRequest
    """The request. If it has an idempotency key, a job of an earlier process may already have the same key."""
    job_id: str | None = None
    """The id of the job, even before the submit. None: not chosen yet."""
    handle: AsyncJob | None = None
    """The handle of the job in the queue. None: the job is not submitted."""
    n_replaced: int = 0
    """Number of jobs of earlier processes that ended without a complete result and that a new job replaces."""

    @property
    def submitted_request(self) -> JobRequest:
        """The request with the idempotency key of its newest job: `KEY`, after a replaced job `KEY:1`, and so on."""
        key = self.request.idempotency_key
        if key is None:
            return self.request
        return self.request.model_copy(update={"idempotency_key": replacement_key(key, self.n_replaced)})

    def must_replace(self, outcome: Result | Exception) -> bool:
        """Return whether the job was submitted by an earlier process, and was cancelled or has failed."""
        is_complete = isinstance(outcome, Result) and outcome.finish_reason in _COMPLETE
        return self.handle is not None and not self.handle.is_new and not is_complete

    def replace(self) -> None:
        """Prepare a new job in place of the job that must be replaced."""
        self.n_replaced += 1
        self.forget()

    def forget(self) -> None:
        """Prepare another submit, because the job does not exist any more."""
        self.job_id = self.handle = None
