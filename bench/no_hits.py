"""What does the prefix cache cost where nothing is shared?

24 jobs over 8 slots at once, 256 random tokens in, no two alike, 64 out, greedy, streamed, on workers that have seen
enough other prompts to be full. `null` is a worker without a cache (`--no-cache-prompt`), `default` one as it comes,
with host memory behind its cells, `held-N` one that may keep N cells on the device and has no host memory: attention
walks held cells in every tick, and these show what that costs. `vs_null` is wall time over that of `null` in the same
round.

`bookkeeping_share` is the share of the engine thread's busy time that goes to deciding about KV memory (`Memory`
without the moving of cells, which is `moves_share`); `added_share` is what all of the scheduler's time, moves included,
is longer than with `null`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu_clock import CpuClock
from engine_thread_time import HOOK, Totals, read_totals, watched
from harness import Figures, Plan, Stack, note, run, show
from llamaq.common.protocol.queue_state import CacheSnapshot
from llamaq.producer import AsyncClient
from llamaq.worker.settings import WorkerSettings
from systems import Round, Side, Sides, figures_of, over_rounds, said, sides, verdict
from workload import Prompts

NULL, DEFAULT = "null", "default"
WALL_TARGET, SHARE_TARGET = 1.10, 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """What every side gets in a round."""

    n_slots: int
    n_jobs: int
    n_in: int
    n_out: int
    n_ctx: int
    held: tuple[int, ...]
    """Points of the curve, in cells."""

    @property
    def n_fill(self) -> int:
        """Jobs of one token out after which the most cells are held."""
        return -(-max(self.held) // self.n_in)


FULL = Load(n_slots=8, n_jobs=24, n_in=256, n_out=64, n_ctx=8192, held=(0, 1024, 2048, 4096))
QUICK = Load(n_slots=2, n_jobs=4, n_in=32, n_out=8, n_ctx=512, held=(0, 256))


@dataclass(slots=True)
class Ledger:
    """The engine threads' totals as they were last read."""

    stack: Stack
    folder: Path
    _last: dict[str, Totals] = field(default_factory=dict)

    def added(self, queue: str, n_jobs: int) -> Totals:
        """What a worker added since the last call, in which `n_jobs` jobs and the client's first one ended."""
        before = self._last.get(queue, Totals())
        now = read_totals(self.folder, self.stack.workers[queue].card.pid, before.jobs + n_jobs + 1)
        self._last[queue] = now
        return now.since(before)


def time_jobs(over: Sides, ledger: Ledger, prompts: list[list[int]], n_out: int) -> Round:
    """The same jobs at once on each side."""
    busy: dict[str, Totals] = {}

    def ask(name: str, side: Side) -> Figures:
        if name not in over.workers:
            return figures_of(side.ask(prompts, n_out))
        clock = CpuClock(over.stack, name)
        before = clock.read()
        figures = figures_of(side.ask(prompts, n_out))
        used = clock.us_per_token(before, figures["tokens"])
        busy[name] = ledger.added(name, len(prompts))
        return figures | {"cpu_us_per_token": used}

    one_round = over.in_turn(ask)
    null = one_round[NULL]["wall_s"]
    for name, totals in busy.items():
        one_round[name] |= engine_figures(totals, busy[NULL])
        one_round[name]["vs_null"] = round(one_round[name]["wall_s"] / null, 4)
    note(", ".join(f"{name} {one['wall_s']} s" for name, one in one_round.items()))
    return one_round


def engine_figures(totals: Totals, null: Totals) -> Figures:
    """The engine thread's time by tick, and the cache's shares of it."""
    by_tick = {
        "tick_ms": totals.busy_s,
        "scheduler_ms": totals.scheduler_s,
        "memory_ms": totals.memory_s,
        "moves_ms": totals.moves_s,
    }
    return {
        "ticks": totals.ticks,
        **{name: round(seconds * 1000 / totals.ticks, 4) for name, seconds in by_tick.items()},
        "bookkeeping_share": round((totals.memory_s - totals.moves_s) / totals.busy_s, 5),
        "moves_share": round(totals.moves_s / totals.busy_s, 5),
        "added_share": round((totals.scheduler_s - null.scheduler_s) / totals.busy_s, 5),
    }


def workers_of(plan: Plan, load: Load) -> dict[str, WorkerSettings]:
    """The worker without a cache, the one with defaults, and those of the curve."""
    common: dict[str, Any] = {"n_parallel": load.n_slots, "n_ctx": load.n_ctx, "hooks": (HOOK,)}
    workers = {NULL: plan.settings(cache_prompt=False, **common), DEFAULT: plan.settings(**common)}
    for cells in load.held:
        workers[f"held-{cells}"] = plan.settings(held_cells=cells, cache_ram_mb=0, **common)
    return workers


async def look(client: AsyncClient) -> CacheSnapshot:
    """The cache of the queue's worker, in a heartbeat that is newer than this call."""
    called_ms = time.time() * 1000
    while True:
        worker = (await client.workers())[0]
        if worker.heartbeat_ms > called_ms:
            return worker.cache
        await asyncio.sleep(0.05)


def measure(plan: Plan) -> Figures:
    """Figures by side."""
    load = QUICK if plan.quick else FULL
    with watched() as folder, sides(workers_of(plan, load)) as over:
        prompts = Prompts(plan.seed, over.n_vocab)
        ledger = Ledger(over.stack, folder)
        time_jobs(over, ledger, prompts.several(load.n_fill, load.n_in), 1)  # warm up, and fill
        rounds = [
            time_jobs(over, ledger, prompts.several(load.n_jobs, load.n_in), load.n_out) for _ in range(plan.rounds)
        ]
        caches = {name: over.stack.run(look, name).model_dump() for name in over.workers}
        peer = over.describe_peer()
    results = over_rounds(rounds)
    for name, cache in caches.items():
        results[name]["cache"] = cache
    _show(results)
    sizes = {"slots": load.n_slots, "jobs": load.n_jobs, "tokens_in": load.n_in, "tokens_out": load.n_out}
    return sizes | {"n_ctx": load.n_ctx} | peer | {"targets": judge(results), "sides": results}


def judge(results: Round) -> Figures:
    """What was to be shown."""
    default = results[DEFAULT]
    return {
        "vs_null": verdict(default["vs_null"], at_most=WALL_TARGET),
        "bookkeeping_share": verdict(default["bookkeeping_share"], at_most=SHARE_TARGET),
    }


def _show(results: Round) -> None:
    columns = ("side", "tok/s", "wall s (range)", "of null", "of peer's", "TTFT p50 ms", "ITL p50 ms", "entries")
    rows: list[tuple[object, ...]] = []
    for name, one in results.items():
        ratios = (f"{one['vs_null']:.2f}" if "vs_null" in one else "-", said(one, "vs_peer"))
        times = (one["ttft_ms"]["p50"], one["itl_ms"]["p50"])
        entries = one["cache"]["entries"] if "cache" in one else "-"
        rows.append((name, one["tokens_per_s"], said(one, "wall_s", 3), *ratios, *times, entries))
    show("nothing shared", columns, rows)
    _show_engine({name: one for name, one in results.items() if "tick_ms" in one})


def _show_engine(workers: Round) -> None:
    columns = (
        "worker",
        "tick ms",
        "scheduler ms",
        "memory ms",
        "moves ms",
        "bookkeeping",
        "moves",
        "added",
        "CPU us/tok",
    )
    rows: list[tuple[object, ...]] = []
    for name, one in workers.items():
        times = [f"{one[key]:.3f}" for key in ("tick_ms", "scheduler_ms", "memory_ms", "moves_ms")]
        shares = [f"{one[key]:.2%}" for key in ("bookkeeping_share", "moves_share", "added_share")]
        rows.append((name, *times, *shares, one["cpu_us_per_token"].get("worker", "-")))
    show("where the engine thread's time goes", columns, rows)


if __name__ == "__main__":
    run(measure)
