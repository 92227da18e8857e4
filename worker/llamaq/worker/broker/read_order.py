"""Keeps the order in which jobs were read, although several jobs are claimed and prepared at the same time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from llamaq.common.protocol.job_request import Priority

MAX_WAIT_S = 0.25
"""How long a prepared job waits for jobs that were read before it. A grammar may take much longer to prepare."""


@dataclass(slots=True, eq=False)
class Place:
    """The place of one job in the order of its priority."""

    priority: Priority
    is_free: asyncio.Event | None = None
    """Set when the job has reached the engine, or will not reach it. None: no other job waits for that."""


class ReadOrder:
    """Lets jobs of one priority reach the engine in the order in which they were read.

    Threads: all methods run on the I/O thread.
    """

    def __init__(self) -> None:
        self._places: dict[Priority, dict[Place, None]] = {priority: {} for priority in Priority}
        """The jobs that have not reached the engine, in the order in which they were read."""

    def enter(self, priority: Priority) -> Place:
        """Return the place behind all jobs of this priority that were read so far."""
        place = Place(priority)
        self._places[priority][place] = None
        return place

    def is_first(self, place: Place) -> bool:
        """Return whether no earlier job of the same priority has its place any more."""
        return next(iter(self._places[place.priority]), place) is place

    async def wait_turn(self, place: Place) -> None:
        """Wait until no earlier job has its place any more, at most `MAX_WAIT_S` seconds."""
        places = self._places[place.priority]
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_WAIT_S):
                while (first := next(iter(places))) is not place:
                    first.is_free = first.is_free or asyncio.Event()
                    await first.is_free.wait()

    def leave(self, place: Place) -> None:
        """Free the place of a job that has reached the engine, or will not reach it."""
        self._places[place.priority].pop(place, None)
        if place.is_free is not None:
            place.is_free.set()

    def __repr__(self) -> str:
        return f"<ReadOrder {' '.join(f'{name}={len(places)}' for name, places in self._places.items())}>"
