"""What does the prefix cache cost where no prefix is shared?

24 jobs run at once on 8 slots: each has a different prompt of 256 random tokens and 64 output tokens, greedy and
streamed.
Before that, other prompts fill the caches. The systems are:

- `null`: a worker without a cache (`--no-cache-prompt`);
- `default`: a worker with default settings, which moves cells to host memory;
- `held-N`: a worker that holds at most N idle cells on the device and has no host memory. Attention scans held cells
  in every tick, and these workers show the cost of this scan.

`vs_null` is the wall time divided by the wall time of `null` in the same round. `bookkeeping_share` is the share of
the engine thread's busy time that is spent on decisions about KV memory (`KvMemory` without moving cells).
`moves_share` is the share of the busy time that is spent on moving cells. `added_share` is the time of the scheduler,
moves included, minus the time of `null`'s scheduler, as a share of the busy time.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu_clock import CpuClock
from engine_thread_time import HOOK, Totals, read_totals, stopwatches_in_workers
from harness import Figures, Plan, Stack, note, run, show
from llamaq.common.protocol.queue_and_worker_state import CacheSnapshot
from llamaq.producer import AsyncClient
from llamaq.worker.settings import WorkerSettings
from systems import Round, System, Systems, check_target, figures_of, format_range, merge_rounds, start_systems
from workload import Prompts

NULL, DEFAULT = "null", "default"
WALL_TARGET, SHARE_TARGET = 1.10, 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a round; lengths in tokens."""

    n_slots: int
    n_jobs: int
    n_in: int
    n_out: int
    n_ctx: int
    held: tuple[int, ...]
    """Values of `held_cells` that are compared."""

    @property
    def n_fill(self) -> int:
        """Number of jobs for the warm-up. Their prompts together fill the largest number of held cells."""
        return -(-max(self.held) // self.n_in)


FULL = Load(n_slots=8, n_jobs=24, n_in=256, n_out=64, n_ctx=8192, held=(0, 1024, 2048, 4096))
QUICK = Load(n_slots=2, n_jobs=4, n_in=32, n_out=8, n_ctx=512, held=(0, 256))


@dataclass(slots=True)
class TotalsReader:
    """Reads the totals of the engine threads, and stores the last totals of each worker."""

    stack: Stack
    folder: Path
    _last: dict[str, Totals] = field(default_factory=dict)

    def since_last(self, queue: str, n_jobs: int) -> Totals:
        """Return a worker's totals since the last call.

        Since then, `n_jobs` jobs and the first job of the client (see `Stack.run`) have ended.
        """
        before = self._last.get(queue, Totals())
        now = read_totals(self.folder, self.stack.workers[queue].card.pid, before.jobs + n_jobs + 1)
        self._last[queue] = now
        return now.since(before)


def time_jobs(systems: Systems, totals_reader: TotalsReader, prompts: list[list[int]], n_out: int) -> Round:
    """Run the same jobs at once on each system."""
    busy: dict[str, Totals] = {}

    def measure_system(name: str, system: System) -> Figures:
        if name not in systems.workers:
            return figures_of(system.generate(prompts, n_out))
        clock = CpuClock(systems.stack, name)
        before = clock.read()
        figures = figures_of(system.generate(prompts, n_out))
        used = clock.us_per_token(before, figures["tokens"])
        busy[name] = totals_reader.since_last(name, len(prompts))
        return figures | {"cpu_us_per_token": used}

    one_round = systems.measure_each(measure_system)
    null = one_round[NULL]["wall_s"]
    for name, totals in busy.items():
        one_round[name] |= engine_figures(totals, busy[NULL])
        one_round[name]["vs_null"] = round(one_round[name]["wall_s"] / null, 4)
    note(", ".join(f"{name} {one['wall_s']} s" for name, one in one_round.items()))
    return one_round


def engine_figures(totals: Totals, null: Totals) -> Figures:
    """Return the engine thread's time per tick, and the cache's shares of its busy time."""
    per_tick = {
        "tick_ms": totals.busy_s,
        "scheduler_ms": totals.scheduler_s,
        "memory_ms": totals.memory_s,
        "moves_ms": totals.moves_s,
    }
    return {
        "ticks": totals.ticks,
        **{name: round(seconds * 1000 / totals.ticks, 4) for name, seconds in per_tick.items()},
        "bookkeeping_share": round((totals.memory_s - totals.moves_s) / totals.busy_s, 5),
        "moves_share": round(totals.moves_s / totals.busy_s, 5),
        "added_share": round((totals.scheduler_s - null.scheduler_s) / totals.busy_s, 5),
    }


def worker_settings(plan: Plan, load: Load) -> dict[str, WorkerSettings]:
    """Return the worker without a cache, the worker with defaults, and one worker for each number of held cells."""
    common: dict[str, Any] = {"n_parallel": load.n_slots, "n_ctx": load.n_ctx, "hooks": (HOOK,)}
    workers = {NULL: plan.settings(cache_prompt=False, **common), DEFAULT: plan.settings(**common)}
    for cells in load.held:
        workers[f"held-{cells}"] = plan.settings(held_cells=cells, cache_ram_mb=0, **common)
    return workers


async def newest_cache_snapshot(client: AsyncClient) -> CacheSnapshot:
    """Return the cache figures of the queue's worker from a heartbeat that is newer than this call."""
    called_ms = time.time() * 1000
    while True:
        worker = (await client.workers())[0]
        if worker.heartbeat_ms > called_ms:
            return worker.cache
        await asyncio.sleep(0.05)


def measure(plan: Plan) -> Figures:
    """Return the figures by system."""
    load = QUICK if plan.quick else FULL
    with stopwatches_in_workers() as folder, start_systems(worker_settings(plan, load)) as systems:
        prompts = Prompts(plan.seed, systems.n_vocab)
        totals_reader = TotalsReader(systems.stack, folder)
        time_jobs(systems, totals_reader, prompts.several(load.n_fill, load.n_in), 1)  # warm up, and fill the caches
        rounds = [
            time_jobs(systems, totals_reader, prompts.several(load.n_jobs, load.n_in), load.n_out)
            for _ in range(plan.rounds)
        ]
        caches = {name: systems.stack.run(newest_cache_snapshot, name).model_dump() for name in systems.workers}
        llama_server = systems.describe_llama_server()
    results = merge_rounds(rounds)
    for name, cache in caches.items():
        results[name]["cache"] = cache
    _show(results)
    sizes = {"slots": load.n_slots, "jobs": load.n_jobs, "tokens_in": load.n_in, "tokens_out": load.n_out}
    return sizes | {"n_ctx": load.n_ctx} | llama_server | {"targets": check_targets(results), "sides": results}


def check_targets(results: Round) -> Figures:
    """Compare the figures with the targets."""
    default = results[DEFAULT]
    return {
        "vs_null": check_target(default["vs_null"], at_most=WALL_TARGET),
        "bookkeeping_share": check_target(default["bookkeeping_share"], at_most=SHARE_TARGET),
    }


def _show(results: Round) -> None:
    columns = (
        "system",
        "tok/s",
        "wall s (range)",
        "of null",
        "of llama-server's",
        "TTFT p50 ms",
        "ITL p50 ms",
        "entries",
    )
    rows: list[tuple[object, ...]] = []
    for name, one in results.items():
        ratios = (f"{one['vs_null']:.2f}" if "vs_null" in one else "-", format_range(one, "vs_peer"))
        times = (one["ttft_ms"]["p50"], one["itl_ms"]["p50"])
        entries = one["cache"]["entries"] if "cache" in one else "-"
        rows.append((name, one["tokens_per_s"], format_range(one, "wall_s", 3), *ratios, *times, entries))
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
