"""The calls by which the I/O thread ends a job on the engine thread."""

from __future__ import annotations

from typing import Protocol

from llamaq.worker.core.job import Lease


class EngineControls(Protocol):
    """The methods of the engine thread that the outbox calls. Every method is thread-safe and does not block."""

    def cancel(self, job_id: str) -> None:
        """Cancel the job."""

    def release(self, lease: Lease) -> None:
        """Drop this attempt of a job without a terminal event: its lease was lost, or the job is requeued."""
