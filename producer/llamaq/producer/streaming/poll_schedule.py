"""Decides when the jobs of silent listeners are polled."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

from llamaq.producer.streaming.job_listener import JobListener

SILENCE_S = 1.0
"""A job that sends tokens is polled after a silence of this length: its status is read from Redis."""
WAITING_SILENCE_S = 5.0
"""The same for a job that waits, or that sends no tokens. It may be silent for hours."""
LONGEST_SILENCE_S = 30.0
"""Each poll that finds no news doubles the time to the next poll, up to this time."""
JITTER = 0.2
"""Up to this share of the time to a poll is added at random, so that not all jobs are polled at once."""


@dataclass(slots=True, order=True)
class _PlannedPoll:
    due_s: float
    number: int
    listener: JobListener = field(compare=False)
    pause_s: float = field(compare=False)
    planned_s: float = field(compare=False)
    """Time at which this poll was planned."""


class PollSchedule:
    """Plans the next poll of each listener. Times are those of the event loop."""

    def __init__(self) -> None:
        self._polls: list[_PlannedPoll] = []
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"<PollSchedule {len(self._polls)} planned>"

    def add(self, listener: JobListener, now_s: float) -> None:
        """Plan the first poll of a listener."""
        self._plan(listener, now_s, _first_pause_s(listener))

    def pop_due(self, now_s: float) -> list[JobListener]:
        """Return the listeners to poll now, and plan their next polls. Closed listeners are dropped."""
        due = []
        while self._polls and self._polls[0].due_s <= now_s:
            poll = heapq.heappop(self._polls)
            listener = poll.listener
            if listener.is_closed:
                continue
            if listener.heard_s >= poll.planned_s:  # a message has ended the silence
                first_s = _first_pause_s(listener)
                if listener.heard_s + first_s > now_s:
                    self._plan(listener, listener.heard_s, first_s)
                    continue
                poll.pause_s = first_s
            due.append(listener)
            self._plan(listener, now_s, min(2 * poll.pause_s, LONGEST_SILENCE_S))
        return due

    def _plan(self, listener: JobListener, start_s: float, pause_s: float) -> None:
        due_s = start_s + pause_s * random.uniform(1, 1 + JITTER)
        heapq.heappush(self._polls, _PlannedPoll(due_s, next(self._numbers), listener, pause_s, start_s))


def _first_pause_s(listener: JobListener) -> float:
    return SILENCE_S if listener.is_receiving else WAITING_SILENCE_S
