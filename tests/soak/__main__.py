"""`make soak`: runs scenarios whose failures are drawn from a seed, and writes a report."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tests.soak.checker import Verdict
from tests.soak.report import ROOT, Outcome, ProgressReport, write_report
from tests.soak.scenarios.attack import attack
from tests.soak.scenarios.batches import batches
from tests.soak.scenarios.cancels import cancels
from tests.soak.scenarios.closings import closings
from tests.soak.scenarios.combinations import combinations
from tests.soak.scenarios.full import full
from tests.soak.scenarios.kills import kills, recall
from tests.soak.scenarios.leases import leases
from tests.soak.scenarios.leaving import leaving
from tests.soak.scenarios.moves import moves
from tests.soak.scenarios.outages import cuts, restarts
from tests.soak.scenarios.poison import poison
from tests.soak.scenarios.rows import many_rows, row_kills, rq_kills
from tests.soak.scenarios.serve import serve
from tests.soak.scenarios.shares import shares
from tests.soak.scenarios.subscribers import subscribers
from tests.soak.scenarios.takeover import stopped, takeover
from tests.soak.scenarios.tenants import tenants
from tests.soak.scenarios.waits import waits

EXIT_STOPPED = 130
LINE_EVERY_S = 5.0
"""Seconds between two lines of progress if the output is not a terminal."""


@dataclass(frozen=True)
class Scenario:
    """A scenario, its size at scale 1, and its approximate duration in seconds at scale 1 on two cores."""

    run: Callable[..., Awaitable[Outcome]]
    sizes: dict[str, int]
    about_s: float

    def at(self, scale: float) -> dict[str, int]:
        """Return the sizes at another scale, each at least 1."""
        return {name: max(1, round(size * scale)) for name, size in self.sizes.items()}


SCENARIOS = {
    "kills": Scenario(kills, {"n_kills": 210, "n_jobs": 5000}, 180),
    "recall": Scenario(recall, {"n_kills": 42, "n_jobs": 400}, 45),
    "takeover": Scenario(takeover, {"n_kills": 30}, 170),
    "stopped": Scenario(stopped, {"n_stops": 20}, 25),
    "restarts": Scenario(restarts, {"n_restarts": 20}, 30),
    "cuts": Scenario(cuts, {"n_cuts": 200}, 40),
    "poison": Scenario(poison, {"n_jobs": 100}, 10),
    "cancels": Scenario(cancels, {"n_each": 50}, 12),
    "subscribers": Scenario(subscribers, {"n_subscribers": 1000}, 15),
    "leaving": Scenario(leaving, {"n_jobs": 200}, 30),
    "moves": Scenario(moves, {"n_rounds": 6}, 60),
    "full": Scenario(full, {"megabytes": 8}, 40),
    "leases": Scenario(leases, {"n_pauses": 10}, 90),
    "tenants": Scenario(tenants, {"n_kills": 60, "n_jobs": 900}, 60),
    "shares": Scenario(shares, {"n_bulk": 4}, 90),
    "waits": Scenario(waits, {"n_jobs": 600, "n_kills": 24}, 60),
    "many_rows": Scenario(many_rows, {"n_rows": 100_000}, 250),
    "row_kills": Scenario(row_kills, {"n_rows": 2000, "n_kills": 10}, 200),
    "rq_kills": Scenario(rq_kills, {"n_rows": 2000, "n_kills": 10}, 300),
    "closings": Scenario(closings, {"n_stops": 40}, 60),
    "serve": Scenario(serve, {"n_rounds": 50}, 200),
    "batches": Scenario(batches, {"n_lines": 50_000, "n_faults": 12}, 240),
    "combinations": Scenario(combinations, {"n_rounds": 60}, 120),
    "attack": Scenario(attack, {"n_attacks": 10_000, "n_examples": 30}, 120),
}


@contextmanager
def progress_line(console: Console, name: str) -> Iterator[ProgressReport]:
    """Show the progress of a scenario: on a terminal as a bar, otherwise as a line every `LINE_EVERY_S` seconds."""
    if console.is_terminal:
        columns = (TextColumn(f"{name:12}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            bar = progress.add_task("")
            yield lambda done, total, what: progress.update(bar, completed=done, total=total, description=what)
        return
    last_s = time.monotonic()

    def line(done: int, total: int, what: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= LINE_EVERY_S:
            last_s = time.monotonic()
            console.print(f"{name}: {done} of {total} {what}")

    yield line


async def soak(seed: int, chosen: dict[str, dict[str, int]], console: Console) -> list[Outcome]:
    """Run the chosen scenarios one after the other. If a scenario raises an error, it has failed, and the next runs."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    outcomes = []
    for name, sizes in chosen.items():
        amount = ", ".join(f"{size} {of.removeprefix('n_')}" for of, size in sizes.items())
        console.print(f"==> {name}: {amount}")
        started_s = time.monotonic()
        try:
            with progress_line(console, name) as report:
                outcome = await SCENARIOS[name].run(seed, report, **sizes)
        except Exception as exc:  # noqa: BLE001  # the report shows every error of a scenario
            console.print_exception()
            outcome = Outcome(
                name, Verdict(others=[f"the scenario raised {exc!r}"]), wall_s=time.monotonic() - started_s
            )
        outcomes.append(outcome)
        console.print(str(outcome), markup=False, highlight=False)
    return outcomes


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help=f"scenarios to run; default: all of {', '.join(SCENARIOS)}"
    )
    parser.add_argument("--seed", type=int, help="seed of all failures and jobs; default: a random seed")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all sizes; 1 is the whole soak")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SCENARIO.SIZE=N", help="set one size, e.g. kills.n_jobs=1000"
    )
    parser.add_argument(
        "--report", type=Path, default=ROOT / "build" / "soak", help="path of the report without .txt and .json"
    )
    options = parser.parse_args()
    if unknown := set(options.scenarios) - SCENARIOS.keys():
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    try:
        options.sizes = sizes_of(options.scenarios, options.scale, options.set)
    except (KeyError, ValueError) as exc:
        parser.error(f"--set: {exc}")
    return options


def sizes_of(names: list[str], scale: float, changes: list[str]) -> dict[str, dict[str, int]]:
    """Return the chosen scenarios with their sizes. Raises `KeyError` or `ValueError` for a wrong `--set`."""
    sizes = {name: scenario.at(scale) for name, scenario in SCENARIOS.items() if name in (names or SCENARIOS)}
    for change in changes:
        place, number = change.split("=")
        name, size = place.split(".")
        if size not in SCENARIOS[name].sizes:
            raise KeyError(place)
        if name in sizes:
            sizes[name][size] = int(number)
    return sizes


def main() -> int:
    """Run the soak and write the report. Returns 0 if the checker found no violation."""
    options = parse()
    console = Console(soft_wrap=True)
    logging.getLogger("llamaq").addHandler(logging.NullHandler())
    seed = random.randrange(10**6) if options.seed is None else options.seed
    about_s = sum(SCENARIOS[name].about_s for name in options.sizes) * options.scale
    console.print(
        f"seed {seed}, scale {options.scale:g}: about {max(1, round(about_s / 60))} minutes on two idle cores"
    )
    try:
        outcomes = asyncio.run(soak(seed, options.sizes, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; no report")
        return EXIT_STOPPED
    write_report(options.report, seed, options.scale, outcomes)
    passed = [outcome.verdict.is_clean for outcome in outcomes]
    console.print(f"{sum(passed)} of {len(passed)} passed; {options.report}.txt and .json; again with SEED={seed}")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
