"""Mixes of jobs that meet each other at the same places, whatever the speed of the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from job_timings import Timeline, summarize
from llamaq.common.protocol.job_request import JobOptions
from llamaq.producer import AsyncClient
from workload import Prompt, follow, greedy


@dataclass(slots=True)
class Progress:
    """How many of the users' tokens have been seen, for those who wait for a share of them."""

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
    """Users with one short job after the other, and long prompts that arrive meanwhile.

    Of three long prompts the first arrives when a quarter of the users' tokens has been seen, and so on: by progress,
    not by the clock, so that a faster side has no easier work.
    """

    short: Sequence[Sequence[Prompt]]
    """By user."""
    long: Sequence[Prompt]
    n_out: int
    long_out: int

    async def run(self, client: AsyncClient) -> dict[str, Any]:
        """Figures of all jobs, of the users' and of the others."""
        progress = Progress(total=sum(map(len, self.short)) * self.n_out)
        async with asyncio.TaskGroup() as tasks:
            users = [tasks.create_task(self._use(client, own, progress)) for own in self.short]
            arriving = [
                tasks.create_task(self._arrive(client, prompt, (index + 1) / (len(self.long) + 1), progress))
                for index, prompt in enumerate(self.long)
            ]
        short = [timeline for user in users for timeline in user.result()]
        long = [task.result() for task in arriving]
        figures = {"all": summarize(short + long), "short": summarize(short)}
        return figures | ({"long": summarize(long)} if long else {})

    async def _use(self, client: AsyncClient, own: Sequence[Prompt], progress: Progress) -> list[Timeline]:
        return [await follow(client, prompt, progress.add, **greedy(self.n_out)) for prompt in own]

    async def _arrive(self, client: AsyncClient, prompt: Prompt, share: float, progress: Progress) -> Timeline:
        await progress.reach(share)
        return await follow(client, prompt, **greedy(self.long_out))


@dataclass(frozen=True, slots=True)
class Bulk:
    """Jobs submitted all at once, in the slow line: prompts and output lengths."""

    jobs: Sequence[tuple[Prompt, int]]

    async def run(self, client: AsyncClient) -> dict[str, Any]:
        """Figures of all jobs."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(follow(client, prompt, **_bulk(n_out))) for prompt, n_out in self.jobs]
        return {"all": summarize([task.result() for task in running])}


def _bulk(n_out: int) -> JobOptions:
    return {**greedy(n_out), "priority": "bulk"}
