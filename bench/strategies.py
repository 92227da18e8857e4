"""The three strategies under two mixes of jobs, each strategy with a worker of its own, in turn.

Interactive: six users, each with one short job after the other, streaming; meanwhile long prompts arrive, the first when
a quarter of the users' tokens has been seen, and so on, so that every strategy meets the same work at the same place.
Bulk: many jobs of mixed lengths at once, more than there are slots. TTFT counts from submit and so includes waiting for
a slot; ITL is the gap between two arrivals at a subscriber.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from harness import Figures, Plan, Stack, note, run, show, stack
from llamaq.common.messages import JobOptions
from llamaq.producer import AsyncClient
from llamaq.worker.strategy import BUILT_IN
from workload import GREEDY, CpuClock, Prompts, Timeline, follow, median_of, summarize

N_PARALLEL = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work a round is; lengths in tokens."""

    users: int = 6
    jobs_per_user: int = 3
    short: tuple[int, int] = (48, 96)
    """Prompt and output of a user's job."""
    long: tuple[int, ...] = (1500, 2250, 3000)
    """Prompts that arrive meanwhile."""
    long_out: int = 16
    bulk_jobs: int = 24
    bulk_in: tuple[int, int] = (32, 768)
    bulk_out: tuple[int, int] = (16, 128)


QUICK = Sizes(users=2, jobs_per_user=1, short=(16, 24), long=(700,), long_out=4, bulk_jobs=10, bulk_in=(16, 64), bulk_out=(4, 12))


@dataclass(slots=True)
class Progress:
    """How many of the users' tokens have been seen, for those who wait for a part of them."""

    total: int
    seen: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, n_tokens: int) -> None:
        self.seen += n_tokens
        self._news.set()

    async def reach(self, share: float) -> None:
        while self.seen < share * self.total:
            self._news.clear()
            await self._news.wait()


@dataclass(frozen=True, slots=True)
class Interactive:
    """One round's prompts of the interactive mix."""

    short: list[list[list[int]]]
    """By user."""
    long: list[list[int]]
    n_out: int
    long_out: int

    @classmethod
    def draw(cls, prompts: Prompts, sizes: Sizes) -> Interactive:
        n_in, n_out = sizes.short
        short = [prompts.several(sizes.jobs_per_user, n_in) for _ in range(sizes.users)]
        return cls(short, [prompts.tokens(length) for length in sizes.long], n_out, sizes.long_out)

    async def run(self, client: AsyncClient) -> dict[str, Any]:
        progress = Progress(total=sum(map(len, self.short)) * self.n_out)
        async with asyncio.TaskGroup() as tasks:
            users = [tasks.create_task(self._use(client, own, progress)) for own in self.short]
            shares = [(index + 1) / (len(self.long) + 1) for index in range(len(self.long))]
            arriving = [
                tasks.create_task(self._arrive(client, prompt, share, progress))
                for prompt, share in zip(self.long, shares, strict=True)
            ]
        short = [timeline for user in users for timeline in user.result()]
        long = [task.result() for task in arriving]
        return {"all": summarize(short + long), "short": summarize(short), "long": summarize(long)}

    async def _use(self, client: AsyncClient, own: Sequence[list[int]], progress: Progress) -> list[Timeline]:
        options: JobOptions = {**GREEDY, "max_tokens": self.n_out}
        return [await follow(client, prompt, progress.add, **options) for prompt in own]

    async def _arrive(self, client: AsyncClient, prompt: list[int], share: float, progress: Progress) -> Timeline:
        await progress.reach(share)
        return await follow(client, prompt, **{**GREEDY, "max_tokens": self.long_out})


@dataclass(frozen=True, slots=True)
class Bulk:
    """One round's jobs of the bulk mix: prompts and output lengths."""

    jobs: list[tuple[list[int], int]]

    @classmethod
    def draw(cls, prompts: Prompts, sizes: Sizes, lengths: Random) -> Bulk:
        return cls(
            [
                (prompts.tokens(lengths.randint(*sizes.bulk_in)), lengths.randint(*sizes.bulk_out))
                for _ in range(sizes.bulk_jobs)
            ]
        )

    async def run(self, client: AsyncClient) -> dict[str, Any]:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(follow(client, prompt, **{**GREEDY, "max_tokens": n_out, "priority": "bulk"}))
                for prompt, n_out in self.jobs
            ]
        return {"all": summarize([task.result() for task in running])}


def time_mix(over: Stack, mix: Interactive | Bulk, strategy: str) -> dict[str, Any]:
    """Figures of one mix under one strategy."""
    clock = CpuClock(over, strategy)
    before = clock.read()
    figures = over.run(mix.run, queue=strategy)
    return figures | {"cpu_us_per_token": clock.us_per_token(before, figures["all"]["tokens"])}


def measure(plan: Plan) -> Figures:
    """Medians over the rounds, by mix and strategy."""
    sizes = QUICK if plan.quick else Sizes()
    workers = [plan.settings(n_parallel=N_PARALLEL, batch_strategy=name, queue=name) for name in BUILT_IN]
    lengths = Random(plan.seed)
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {"interactive": {}, "bulk": {}}
    with stack(workers) as over:
        prompts = Prompts(plan.seed, over.worker.card.n_vocab)
        for name in BUILT_IN:  # warm up
            time_mix(over, Bulk.draw(prompts, QUICK, lengths), name)
        for _ in range(plan.rounds):
            mixes = {"interactive": Interactive.draw(prompts, sizes), "bulk": Bulk.draw(prompts, sizes, lengths)}
            for mix, jobs in mixes.items():
                for name in BUILT_IN:
                    figures = time_mix(over, jobs, name)
                    rounds[mix].setdefault(name, []).append(figures)
                    note(f"{mix}, {name}: {figures['all']['tokens_per_s']} tokens/s")
    medians = {mix: {name: median_of(figures) for name, figures in by_name.items()} for mix, by_name in rounds.items()}
    for mix, by_name in medians.items():
        _show(mix, by_name, "short" if mix == "interactive" else "all")
    return {"slots": N_PARALLEL, "sizes": _as_dict(sizes), **medians}


def _as_dict(sizes: Sizes) -> dict[str, Any]:
    return {name: getattr(sizes, name) for name in Sizes.__dataclass_fields__}


def _show(mix: str, by_name: dict[str, Any], group: str) -> None:
    columns = ("strategy", "tok/s", "TTFT p50", "p95", "ITL p50", "p95", "p99", "max ms", "long TTFT p50")
    rows = []
    for name, figures in by_name.items():
        ttft, itl = figures[group]["ttft_ms"], figures[group]["itl_ms"]
        long = figures["long"]["ttft_ms"]["p50"] if "long" in figures else ""
        rows.append((name, figures["all"]["tokens_per_s"], ttft["p50"], ttft["p95"], *itl.values(), long))
    show(f"{mix} mix", columns, rows)


if __name__ == "__main__":
    run(measure)
