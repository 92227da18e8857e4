"""Which failure happens where and when, and the shapes of the jobs: all drawn from the seed."""

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
"""Of each phase the points where a worker kills itself, and the latest pass at which it does.

`publish`: Redis has stored tokens or an end, and the worker has not heeded the answer. `reclaim`: it has just taken
over the jobs of another one that died, before or after it started them.
"""
VOCABULARY = range(3, 500)
"""Plain tokens of a random-weight model."""


def dice(seed: int, name: str) -> random.Random:
    """Random numbers of one purpose: what others draw does not change them."""
    return random.Random(f"{seed}:{name}")


def shares(total: int, names: list[str]) -> Counter[str]:
    """`total` things spread evenly over the names; what is left over goes to the last ones."""
    return Counter({name: (total + place) // len(names) for place, name in enumerate(names)})


@dataclass(eq=False)
class KillPlan:
    """How many workers die in which phase. Each worker is given one phase; where it did die counts."""

    rng: random.Random
    n_kills: int
    left: Counter[str] = field(init=False)
    """Deaths that a phase still lacks."""
    done: Counter[str] = field(default_factory=Counter)
    """Deaths by phase."""
    points: Counter[str] = field(default_factory=Counter)
    """Deaths by point."""

    def __post_init__(self) -> None:
        self.left = shares(self.n_kills, list(POINTS))

    @property
    def is_done(self) -> bool:
        """Whether every phase has its share, and so all kills are done."""
        return not +self.left

    @property
    def n_done(self) -> int:
        """How many of the kills that were asked for are done."""
        return self.n_kills - (+self.left).total()

    def arms(self, given: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the arms of the next worker, empty if nothing kills it. `given` are the arms of the living workers."""
        armed = Counter(phase_of(arms["point"]) for arms in given if "point" in arms)
        lacking = self.left - armed
        if not lacking:
            return {}
        phase = self.rng.choices(list(lacking), list(lacking.values()))[0]
        if lacking[RECLAIM] and not armed[RECLAIM]:
            phase = RECLAIM  # it comes to pass when another worker dies: that must not be the last of all
        point, latest = self.rng.choice(list(POINTS[phase].items()))
        return {"point": point, "passes": self.rng.randint(1, latest)}

    def note(self, point: str) -> None:
        """A worker died there."""
        self.points[point] += 1
        self.done[phase_of(point)] += 1
        self.left[phase_of(point)] -= 1


def phase_of(point: str) -> str:
    """The phase that a point belongs to; a point outside the plan is its own."""
    return next((phase for phase, points in POINTS.items() if point in points), point)


@dataclass(frozen=True)
class JobShape:
    """A job before it is submitted, and the number of its readers."""

    options: dict[str, Any]
    """What `submit` takes."""
    n_readers: int = 1
    demands: dict[str, Any] = field(default_factory=dict)
    """What the checker demands of it (`Accepted`)."""

    @property
    def streams(self) -> bool:
        return bool(self.options.get("stream", True))


def draw_job(rng: random.Random, *, prompt_tokens: int = 200, max_tokens: int = 32) -> JobShape:
    """A job of random tokens: most stream to one reader, some to two, some have a result alone, some are bulk."""
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
