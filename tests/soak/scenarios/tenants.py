"""Three tenants beside each other under kills: nothing is lost, and each gets its share of the slots."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tests.soak.chaos import KillPlan, draw_job, seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import Environment
from tests.soak.load import collect, record_published, run_job, run_jobs, run_with_background
from tests.soak.report import Outcome, ProgressReport
from tests.soak.scenarios.kills import SETTINGS, figures_of
from tests.soak.worker_pool import WorkerPool

from llamaq.common.background_tasks import cancel_tasks
from llamaq.producer import AsyncClient

WIDTHS = {"many": 60, "some": 16, "few": 16}
"""Largest number of open jobs of each tenant: more than its share of the slots."""
LOOK_EVERY_S = 0.05
"""Time between two looks at the claimed jobs of the tenants."""
MAX_LEAD = 1.0
"""Largest allowed difference of the mean numbers of claimed jobs of two tenants, while all tenants wait."""
MIN_LOOKS = 50
"""Number of looks from which the difference is judged."""


async def tenants(
    seed: int, report: ProgressReport, *, n_kills: int = 60, n_jobs: int = 900, n_workers: int = 3
) -> Outcome:
    """Run jobs of three tenants, of which one submits four times as many, until each has ended its part of `n_jobs`."""
    rng, checker, started_s = seeded_random(seed, "tenants"), Checker(), time.monotonic()
    n_each, ended = n_jobs // len(WIDTHS), Counter[str]()
    claimed: list[dict[str, int]] = []
    async with Environment(settings=SETTINGS) as environment:
        environment.use_random_model()
        plan = KillPlan(seeded_random(seed, "kills"), n_kills)
        pool = WorkerPool(environment, plan, n_workers, pace=lambda: min(ended[one] for one in WIDTHS) / n_each)
        async with environment.client() as client, record_published(client, checker):

            async def run(tenant: str) -> None:
                async def one_job() -> None:
                    shape = draw_job(rng)
                    shape = replace(shape, options={**shape.options, "tenant": tenant, "priority": "interactive"})
                    await run_job(client, checker, shape)
                    ended[tenant] += 1
                    report(plan.n_done, plan.n_kills, f"kills, {ended.total()} jobs")

                await run_jobs(one_job, width=WIDTHS[tenant], wants_more=wants_more)

            def wants_more(n_begun: int, n_open: int) -> bool:
                return not plan.is_done or any(ended[tenant] < n_each for tenant in WIDTHS)

            async def run_all() -> None:
                looking = asyncio.create_task(_look(client, claimed))
                async with asyncio.TaskGroup() as tasks:
                    for tenant in WIDTHS:
                        tasks.create_task(run(tenant))
                await cancel_tasks(looking)

            await run_with_background(pool.run(), run_all())
            await collect(client, checker)
            left = await _keys_of_tenants(client)
    if left:
        checker.add_violation(f"keys of tenants without jobs remain: {left[:5]}")
    means = _judge(claimed, checker.add_violation)
    figures = figures_of(plan, checker, started_s)
    figures |= {"jobs of each tenant": dict(ended), "claimed jobs of each tenant, on average while all wait": means}
    return Outcome("tenants", checker.judge(), figures, time.monotonic() - started_s)


async def _look(client: AsyncClient, claimed: list[dict[str, int]]) -> None:
    """Append to `claimed` the numbers of claimed jobs of the tenants, at each look at which all of them wait."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        waiting = {one.tenant: one.claimed for one in (await client.queue_depth()).tenants if one.waiting}
        if waiting.keys() == WIDTHS.keys():
            claimed.append(waiting)


def _judge(claimed: list[dict[str, int]], add_violation: Callable[[str], None]) -> dict[str, float]:
    """Return the mean number of claimed jobs of each tenant. Tenants with unequal means are a violation."""
    if not claimed:
        return {}
    means = {tenant: round(sum(look[tenant] for look in claimed) / len(claimed), 2) for tenant in WIDTHS}
    if len(claimed) >= MIN_LOOKS and max(means.values()) - min(means.values()) > MAX_LEAD:
        add_violation(f"the tenants had unequal shares of the slots: {means}")
    return {**means, "looks": len(claimed)}


async def _keys_of_tenants(client: AsyncClient) -> list[str]:
    patterns = (f"{client.keys.prefix}:{{{client.queue}:*}}:{kind}:*" for kind in ("turns", "shares"))
    return [key.decode() for pattern in patterns async for key in client.redis.scan_iter(match=pattern, count=1000)]
