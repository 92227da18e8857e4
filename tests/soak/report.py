"""The result of a soak: figures and violations of each scenario, as text and as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.soak.checker import Verdict

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("llama-cpp-python", "llamaq", "redis")

ProgressReport = Callable[[int, int, str], None]
"""A callback that gets the number of finished steps of a scenario, the total number of steps, and a description."""


@dataclass
class Outcome:
    """The measurements of a scenario and the verdict of the checker."""

    name: str
    verdict: Verdict
    figures: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def as_json(self) -> dict[str, Any]:
        verdict = self.verdict
        return {
            "passed": verdict.is_clean,
            "wall_s": round(self.wall_s, 1),
            "figures": self.figures,
            "jobs": verdict.n_jobs,
            "readings": verdict.n_readings,
            "events": verdict.n_events,
            "tokens": verdict.n_tokens,
            "violations": verdict.counts,
            "details": list(verdict.lines()),
        }

    def __str__(self) -> str:
        verdict = self.verdict
        seen = f"{verdict.n_jobs} jobs, {verdict.n_readings} readings, {verdict.n_events} events"
        lines = [f"{'passed' if verdict.is_clean else 'FAILED'}  {self.name}: {seen}, {self.wall_s:.0f} s"]
        lines += [f"        {name}: {_plain(value)}" for name, value in self.figures.items()]
        lines.append(f"        {', '.join(f'{count} {name}' for name, count in verdict.counts.items())}")
        lines += [f"    !!  {line}" for line in verdict.lines()]
        return "\n".join(lines)


def _plain(value: object) -> str:
    return ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)


def percentiles(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return count, p50, p99 and maximum. The p99 of fewer than 100 values is the maximum."""
    ranked = sorted(values)
    if not ranked:
        return {"count": 0}
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    found = {name: ranked[min(len(ranked) - 1, int(share * len(ranked)))] for name, share in places.items()}
    return {"count": len(ranked), **{name: round(value, digits) for name, value in found.items()}}


def write_report(path: Path, seed: int, scale: float, outcomes: Sequence[Outcome]) -> str:
    """Write `path`.json and `path`.txt, and return the text."""
    facts = {
        "seed": seed,
        "scale": scale,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _commit(),
    }
    passed = all(outcome.verdict.is_clean for outcome in outcomes)
    whole = {**facts, "passed": passed, "scenarios": {outcome.name: outcome.as_json for outcome in outcomes}}
    head = "\n".join(f"{name}: {_plain(value)}" for name, value in facts.items())
    text = f"{head}\n\n" + "\n\n".join(map(str, outcomes)) + f"\n\n{'passed' if passed else 'FAILED'}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(whole, indent=2) + "\n")
    path.with_suffix(".txt").write_text(text)
    return text


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
