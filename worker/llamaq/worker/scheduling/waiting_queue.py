"""The line of jobs that this worker has claimed and that do not have a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.job import Job

MAX_PASSED = 8
"""So often may a job be passed by others that came later. Nobody else can take a claimed job, so it must not wait for
ever."""
TURN_TOKENS = 64
"""A bulk job whose turn came because it was passed so often generates so many tokens before it may be preempted."""
LOOK_AHEAD = 16
"""So many jobs of a line are compared for what they would reuse."""
MIN_LEAD = 16
"""Tokens that a job must be able to reuse, more than the first one could, to pass it."""


class WaitingQueue:
    """Interactive jobs before bulk jobs, and first come first served within each, with two exceptions.

    A job whose prompt is in KV memory already may pass those before it, and an interactive job a bulk job, but no
    job is passed more than `MAX_PASSED` times. A job whose turn it is and that finds no room is passed by nobody of
    its line: otherwise small jobs would starve large ones.
    """

    def __init__(self) -> None:
        self._lines: dict[Priority, dict[str, Job]] = {priority: {} for priority in Priority}
        self._passed: dict[str, int] = {}
        """How often jobs of the line were passed by others of it."""
        self._bulk_passed = 0

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[Job]:
        for line in self._lines.values():
            yield from line.values()

    def put(self, job: Job) -> None:
        self._lines[job.request.priority][job.id] = job

    def put_back(self, job: Job) -> None:
        """A job that had a slot and gave it up: it stands first in its line again."""
        line = self._lines[job.request.priority]
        self._lines[job.request.priority] = {job.id: job, **line}

    def next(self, has_slot: Callable[[Job], bool], gain: Callable[[Job], int]) -> Job | None:
        """The job whose turn it is among those for whom a slot is idle.

        `gain` says how many tokens a job would reuse.
        """
        for line in self._order():
            able = list(islice((job for job in line.values() if has_slot(job)), LOOK_AHEAD))
            if able:
                return self._best(able, gain)
        return None

    def _order(self) -> list[dict[str, Job]]:
        interactive, bulk = self._lines[Priority.INTERACTIVE], self._lines[Priority.BULK]
        return [bulk, interactive] if self._bulk_passed >= MAX_PASSED else [interactive, bulk]

    def _best(self, able: list[Job], gain: Callable[[Job], int]) -> Job:
        first = able[0]
        if len(able) == 1 or self._passed.get(first.id, 0) >= MAX_PASSED:
            return first
        gains = [gain(job) for job in able]
        most = max(gains)
        return able[gains.index(most)] if most >= gains[0] + MIN_LEAD else first

    @property
    def first_interactive(self) -> Job | None:
        """The interactive job that came first; it need not wait for a bulk job to end."""
        return next(iter(self._lines[Priority.INTERACTIVE].values()), None)

    def take(self, job: Job) -> None:
        """It is the job's turn, and it gets a slot."""
        for other in self._lines[job.request.priority]:
            if other == job.id:
                break
            self._passed[other] = self._passed.get(other, 0) + 1
        self.remove(job)
        if job.request.priority is Priority.BULK and self._bulk_passed >= MAX_PASSED:
            job.protected_tokens = len(job.resumed) + TURN_TOKENS
            self._bulk_passed = 0
        elif job.request.priority is Priority.INTERACTIVE and self._lines[Priority.BULK]:
            self._bulk_passed += 1

    def remove(self, job: Job) -> None:
        """The job leaves the line."""
        del self._lines[job.request.priority][job.id]
        self._passed.pop(job.id, None)

    def __repr__(self) -> str:
        return f"<WaitingQueue {' '.join(f'{name}={len(line)}' for name, line in self._lines.items())}>"
