"""Mixes of interactive and bulk jobs. Jobs arrive at points that do not depend on the speed of the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from job_timings import Timeline, summarize
from llamaq.common.protocol.job_options import JobOptions
from llamaq.producer import AsyncClient
from workload import Prompt, follow, greedy


@dataclass(slots=True)
class Progress:
    """Counts the tokens that the users have received, and lets a task wait until a share of them has arrived."""

    total: int
    seen: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, n_tokens: int) -> None:
        self.seen += n_tokens
        self._changed.set()

    async def reach(self, share: float) -> None:
        """Wait until this share of all tokens has arrived."""
        while self.seen < share * self.total:
            self._changed.clear()
            await self._changed.wait()


@dataclass(frozen=True, slots=True)
class Interactive:
    """Users that run one short job after the other, and long prompts that arrive meanwhile.

    The long prompts arrive at even shares of the users' tokens: of three long prompts, the first one arrives when the
    users have received a quarter of their tokens. Arrivals depend on progress and not on the clock, so that a
    fast and a slow system get the same work.
    """

    short: Sequence[Sequence[Prompt]]
    """For each user, the prompts of the user's jobs in order."""
    long: Sequence[Prompt]
    n_out: int
    long_out: int

    async def run(self, client: AsyncClient) -> dict[str, Any]:
        """Run the mix and return the figures of all jobs, of the users' short jobs and of the long prompts."""
        progress = Progress(total=sum(map(len, self.short)) * self.n_out)
        async with asyncio.TaskGroup() as tasks:
            users = [tasks.create_task(self._run_user(client, prompts, progress)) for prompts in self.short]
            arriving = [
                tasks.create_task(self._run_long(client, prompt, (index + 1) / (len(self.long) + 1), progress))
                for index, prompt in enumerate(self.long)
            ]
        short = [timeline for user in users for timeline in user.result()]
        long = [task.result() for task in arriving]
        figures = {"all": summarize(short + long), "short": summarize(short)}
        return figures | ({"long": summarize(long)} if long else {})

    async def _run_user(self, client: AsyncClient, prompts: Sequence[Prompt], progress: Progress) -> list[Timeline]:
        return [await follow(client, prompt, progress.add, **greedy(self.n_out)) for prompt in prompts]

    async def _run_long(self, client: AsyncClient, prompt: Prompt, share: float, progress: Progress) -> Timeline:
        await progress.reach(share)
        return await follow(client, prompt, **greedy(self.long_out))


@dataclass(frozen=True, slots=True)
class Bulk:
    """Jobs of priority `bulk` that are submitted all at once."""

    jobs: Sequence[tuple[Prompt, int]]
    """Prompt and output length in tokens of each job."""

    async def run(self, client: AsyncClient) -> dict[str, Any]:
        """Run the mix and return the figures of all jobs."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(follow(client, prompt, **_bulk(n_out))) for prompt, n_out in self.jobs]
        return {"all": summarize([task.result() for task in running])}


def _bulk(n_out: int) -> JobOptions:
    return {**greedy(n_out), "priority": "bulk"}
