"""The jobs that this worker has claimed and whose end Redis has not stored."""

from __future__ import annotations

from collections.abc import Iterator

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.broker.job_progress import JobProgress
from llamaq.worker.core.job import Lease


class ClaimedJobs:
    """Maps the id of each claimed job to its progress. A newer attempt of a job replaces the older one."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobProgress] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobProgress]:
        return iter(self._jobs.values())

    def __contains__(self, job: JobProgress) -> bool:
        return self._jobs.get(job.lease.job_id) is job

    def get(self, job_id: str) -> JobProgress | None:
        """Return the progress of a job. None: this worker has not claimed the job."""
        return self._jobs.get(job_id)

    def of(self, lease: Lease) -> JobProgress | None:
        """Return the progress of this attempt of a job. None: it has ended, or its lease is lost."""
        job = self._jobs.get(lease.job_id)
        return job if job is not None and job.lease == lease else None

    def of_partition(self, number: int) -> list[JobProgress]:
        """Return the jobs of a partition."""
        return [job for job in self._jobs.values() if job.lease.partition == number]

    def put(self, job: JobProgress) -> None:
        """Add a job, or replace its progress."""
        self._jobs[job.lease.job_id] = job

    def remove(self, job: JobProgress) -> None:
        """Remove the job, unless a newer attempt has replaced it."""
        if job in self:
            del self._jobs[job.lease.job_id]

    @property
    def n_running(self) -> int:
        """Number of jobs that have not ended, with or without a slot."""
        return sum([job.terminal_write is None for job in self._jobs.values()])

    @property
    def n_running_interactive(self) -> int:
        """Number of interactive jobs that have not ended."""
        return sum(
            [job.terminal_write is None and job.lease.priority is Priority.INTERACTIVE for job in self._jobs.values()]
        )

    def __repr__(self) -> str:
        return f"<ClaimedJobs {len(self)}, {self.n_running} running>"
