"""Draws the failures of workers and the shapes of jobs from the seed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

OUTSIDE, RECLAIM = "outside", "reclaim"
POINTS: dict[str, dict[str, int]] = {
    RECLAIM: {"reclaim.claimed": 2, "reclaim.started": 4},
    OUTSIDE: {OUTSIDE: 1},
    "admit": {"admit.claimed": 6, "admit.started": 12, "admit.handed": 12},
    "prefill": {"prefill.before": 40, "prefill.after": 40},
    "publish": {"publish.flushed": 40, "publish.finished": 12},
    "decode": {"decode.before": 60, "decode.after": 60},
}
"""Maps each phase to its points, at which a worker kills itself. Maps each point to the largest value of `passes`.

`publish`: Redis has stored tokens or a terminal event, but the worker has not processed the reply. `reclaim`: the
worker has just claimed jobs of a dead worker, or has just started one of them.
"""
VOCABULARY = range(3, 500)
"""Ids of ordinary tokens of a random-weight model."""


def seeded_random(seed: int, name: str) -> random.Random:
    """Return a random generator for one purpose. Draws from other generators do not change its numbers."""
    return random.Random(f"{seed}:{name}")


def split_evenly(total: int, names: list[str]) -> Counter[str]:
    """Return `total` split over the names as evenly as possible. The last names get the remainder."""
    return Counter({name: (total + place) // len(names) for place, name in enumerate(names)})


@dataclass(eq=False)
class KillPlan:
    """The number of workers to kill in each phase.

    A death counts for the phase in which the worker died, even if the kill was planned for another phase.
    """

    rng: random.Random
    n_kills: int
    left: Counter[str] = field(init=False)
    """Number of deaths still to come, by phase."""
    done: Counter[str] = field(default_factory=Counter)
    """Number of deaths, by phase."""
    points: Counter[str] = field(default_factory=Counter)
    """Number of deaths, by point."""

    def __post_init__(self) -> None:
        self.left = split_evenly(self.n_kills, list(POINTS))

    @property
    def is_done(self) -> bool:
        """Whether every phase has its planned number of deaths."""
        return not +self.left

    @property
    def n_done(self) -> int:
        """Number of planned kills that are done. Surplus deaths of a phase do not count."""
        return self.n_kills - (+self.left).total()

    def faults(self, running: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the faults of the next worker, or an empty dict if no more kills are planned.

        Args:
            running: The faults of the running workers.
        """
        planned = Counter(phase_of(faults["point"]) for faults in running if "point" in faults)
        lacking = self.left - planned
        if not lacking:
            return {}
        phase = self.rng.choices(list(lacking), list(lacking.values()))[0]
        if lacking[RECLAIM] and not planned[RECLAIM]:
            phase = RECLAIM  # first, because a worker reclaims jobs only if another worker dies later
        point, latest = self.rng.choice(list(POINTS[phase].items()))
        return {"point": point, "passes": self.rng.randint(1, latest)}

    def note(self, point: str) -> None:
        """Record that a worker died at this point."""
        self.points[point] += 1
        self.done[phase_of(point)] += 1
        self.left[phase_of(point)] -= 1


def phase_of(point: str) -> str:
    """Return the phase to which a point belongs. If the point belongs to no phase, return the point itself."""
    return next((phase for phase, points in POINTS.items() if point in points), point)


@dataclass(frozen=True)
class JobShape:
    """A job before it is submitted, and the number of its readers."""

    options: dict[str, Any]
    """Arguments of `AsyncClient.submit`."""
    n_readers: int = 1
    demands: dict[str, Any] = field(default_factory=dict)
    """Requirements for the checker: fields of `Accepted`."""


def draw_job(rng: random.Random, *, prompt_tokens: int = 200, max_tokens: int = 32) -> JobShape:
    """Return a job with a random prompt. Some jobs have two readers, some no stream, and some the priority `bulk`."""
    n_tokens = rng.randint(1, max_tokens)
    options: dict[str, Any] = {
        "tokens": rng.choices(VOCABULARY, k=rng.randint(8, prompt_tokens)),
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "temperature": rng.choice((0.0, 0.8)),
        "seed": rng.getrandbits(32),
        "stream": rng.random() < 0.9,
        "priority": "bulk" if rng.random() < 0.2 else "interactive",
    }
    demands = {"n_tokens": n_tokens, "ending": "length"}
    return JobShape(options, n_readers=2 if rng.random() < 0.1 else 1, demands=demands)
