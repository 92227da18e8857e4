"""Compares the batch strategies with two mixes of jobs. Each strategy has a worker. The workers run in turn.

Interactive mix: each of six users runs one short streamed job after the other, while long prompts arrive. Bulk mix:
jobs of mixed lengths, all submitted at once, three for each slot. TTFT is the time from submit to the first token, with
the wait for a slot. ITL is the time between two arrivals at a subscriber.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from cpu_clock import CpuClock
from harness import Figures, Plan, Stack, note, run, show, start_stack
from job_mixes import Bulk, Interactive
from job_timings import median_of
from llamaq.worker.plugins import BUILT_IN
from workload import Prompts

N_PARALLEL = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """The work of a round; lengths in tokens."""

    users: int = 6
    jobs_per_user: int = 3
    short: tuple[int, int] = (48, 96)
    """Lengths of prompt and output of a user's job."""
    long: tuple[int, ...] = (1500, 2250, 3000)
    """Lengths of the long prompts that arrive meanwhile."""
    long_out: int = 16
    """Output length of a long prompt's job."""
    bulk_jobs: int = 24
    bulk_in: tuple[int, int] = (32, 768)
    """Shortest and longest prompt of a bulk job."""
    bulk_out: tuple[int, int] = (16, 128)
    """Shortest and longest output of a bulk job."""

    def interactive(self, prompts: Prompts) -> Interactive:
        """Return the interactive mix with new prompts."""
        n_in, n_out = self.short
        short = [prompts.several(self.jobs_per_user, n_in) for _ in range(self.users)]
        return Interactive(short, [prompts.tokens(length) for length in self.long], n_out, self.long_out)

    def bulk(self, prompts: Prompts, lengths: Random) -> Bulk:
        """Return the bulk mix with new prompts; `lengths` draws their lengths."""
        sizes = [(lengths.randint(*self.bulk_in), lengths.randint(*self.bulk_out)) for _ in range(self.bulk_jobs)]
        return Bulk([(prompts.tokens(n_in), n_out) for n_in, n_out in sizes])


QUICK = Sizes(
    users=2,
    jobs_per_user=1,
    short=(16, 24),
    long=(700,),
    long_out=4,
    bulk_jobs=10,
    bulk_in=(16, 64),
    bulk_out=(4, 12),
)


def time_mix(stack: Stack, mix: Interactive | Bulk, strategy: str) -> dict[str, Any]:
    """Run one mix under one strategy and return its figures."""
    clock = CpuClock(stack, strategy)
    before = clock.read()
    figures = stack.run(mix.run, queue=strategy)
    return figures | {"cpu_us_per_token": clock.us_per_token(before, figures["all"]["tokens"])}


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds by mix and strategy."""
    sizes, names, lengths = QUICK if plan.quick else Sizes(), list(BUILT_IN), Random(plan.seed)
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {
        mix: {name: [] for name in names} for mix in ("interactive", "bulk")
    }
    with start_stack(
        [plan.settings(n_parallel=N_PARALLEL, batch_strategy=name, queue=name) for name in names]
    ) as stack:
        prompts = Prompts(plan.seed, stack.worker.card.n_vocab)
        for name in names:  # warm up
            time_mix(stack, QUICK.bulk(prompts, lengths), name)
        for _ in range(plan.rounds):
            mixes: tuple[tuple[str, Interactive | Bulk], ...] = (
                ("interactive", sizes.interactive(prompts)),
                ("bulk", sizes.bulk(prompts, lengths)),
            )
            for mix, jobs in mixes:
                for name in names:
                    rounds[mix][name].append(time_mix(stack, jobs, name))
            note(_describe(rounds))
            names = [*names[1:], names[0]]  # another strategy is first in the next round
    medians = {mix: {name: median_of(rounds[mix][name]) for name in BUILT_IN} for mix in rounds}
    _show("interactive mix, the users", medians["interactive"], "short")
    _show("bulk mix", medians["bulk"], "all")
    return {"slots": N_PARALLEL, "sizes": asdict(sizes), **medians}


def _describe(rounds: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    last = {mix: {name: done[-1]["all"]["tokens_per_s"] for name, done in of.items()} for mix, of in rounds.items()}
    return f"tokens/s: {last}"


def _show(title: str, by_name: dict[str, Any], group: str) -> None:
    columns: Sequence[str] = ("", "tok/s", "TTFT p50", "p95", "ITL p50", "p95", "p99", "max ms", "long TTFT p50")
    rows = []
    for name, figures in by_name.items():
        ttft, itl = figures[group]["ttft_ms"], figures[group]["itl_ms"]
        long = figures["long"]["ttft_ms"]["p50"] if "long" in figures else ""
        rows.append((name, figures["all"]["tokens_per_s"], ttft["p50"], ttft["p95"], *itl.values(), long))
    show(title, columns, rows)


if __name__ == "__main__":
    run(measure)
