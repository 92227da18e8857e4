"""The line of jobs that this worker has claimed and that do not have a slot yet."""

from __future__ import annotations

from collections.abc import Iterator

from llamaq.common.messages import Priority
from llamaq.worker.jobs import Job

MAX_PASSED = 8
"""So many interactive jobs may pass a bulk job. Nobody else can take a claimed job, so it must not wait for ever."""


class WaitingLine:
    """Interactive jobs before bulk jobs, first come first served within each.

    Only the first job may be taken: while it waits for room nobody passes it except, a few times, an interactive
    job that came later. Otherwise small jobs would starve large ones.
    """

    def __init__(self) -> None:
        self._lines: dict[Priority, dict[str, Job]] = {priority: {} for priority in Priority}
        self._passed = 0

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[Job]:
        for line in self._lines.values():
            yield from line.values()

    def put(self, job: Job) -> None:
        self._lines[job.request.priority][job.id] = job

    @property
    def first(self) -> Job | None:
        """The job whose turn it is."""
        interactive, bulk = self._lines[Priority.INTERACTIVE], self._lines[Priority.BULK]
        line = bulk if bulk and (not interactive or self._passed >= MAX_PASSED) else interactive
        return next(iter(line.values()), None)

    def take(self, job: Job) -> None:
        """It is the job's turn, and it gets a slot."""
        self.remove(job)
        if job.request.priority is Priority.BULK:
            self._passed = 0
        elif self._lines[Priority.BULK]:
            self._passed += 1

    def remove(self, job: Job) -> None:
        """The job leaves without a slot."""
        del self._lines[job.request.priority][job.id]

    def __repr__(self) -> str:
        return f"<WaitingLine {' '.join(f'{name}={len(line)}' for name, line in self._lines.items())}>"
