"""Runs n + 1 prompts in cycles on n slots: is any prompt computed twice?

11 prompts of 512 random tokens run on 10 slots, one after the other, with 16 output tokens each, greedy and streamed.
There are three cycles. In each cycle every system gets all prompts, one system after the other. Each round has new
prompts.

The pool has cells for all prompts (`all_in_cells`) or for half of them (`half_in_cells`). Both systems have host
memory for all prompts and use it in both cases: llama-server moves the cells of idle slots to host memory when a task
begins, and a worker keeps at most `held_cells` cached cells beside the running jobs (here the default).

`reused` is the share of the prompts' tokens that were taken from a cache and not computed. `vs_peer` is the wall time
divided by llama-server's. In the first cycle nothing can be reused, so the `vs_peer` of this cycle shows the difference
between the two builds of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness import Figures, Plan, note, run, show
from systems import Round, Systems, check_target, format_range, merge_rounds, round_up_to_cell_block, start_systems
from workload import Prompts

QUEUE = "llamaq"
VS_LLAMA_SERVER_TARGET = 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a cycle; lengths in tokens."""

    n_slots: int
    n_in: int
    n_out: int
    n_cycles: int

    @property
    def n_prompts(self) -> int:
        return self.n_slots + 1

    def n_ctx(self, n: float) -> int:
        """Return the number of cells for `n` prompts and their answers."""
        return round_up_to_cell_block(n * (self.n_in + self.n_out))


FULL = Sizes(n_slots=10, n_in=512, n_out=16, n_cycles=3)
QUICK = Sizes(n_slots=2, n_in=240, n_out=8, n_cycles=2)


@dataclass(frozen=True, slots=True)
class Pool:
    """A size of the pool of KV cells, and the target for `reused` from the second cycle on."""

    name: str
    share: float
    """Share of the prompts whose cells fit into the pool."""
    target: float


POOLS = (Pool("all_in_cells", 1.0, 0.99), Pool("half_in_cells", 0.5, 0.95))


def time_cycles(systems: Systems, prompts: list[list[int]], sizes: Sizes) -> list[Round]:
    """Measure all cycles of one round."""
    cycles = []
    for number in range(1, sizes.n_cycles + 1):
        cycles.append(systems.generate_one_by_one(prompts, sizes.n_out))
        reused = ", ".join(f"{name} {one['wall_s']} s, {one['reused']:.1%} reused" for name, one in cycles[-1].items())
        note(f"cycle {number}: {reused}")
    return cycles


def measure_pool(plan: Plan, pool: Pool, sizes: Sizes) -> Figures:
    """Return the figures by cycle for one size of the pool."""
    # A pool for all prompts has room for one more, so that one prompt can run while all others stay cached.
    n_ctx = sizes.n_ctx(sizes.n_prompts + 1 if pool.share == 1 else sizes.n_prompts * pool.share)
    settings = plan.settings(n_parallel=sizes.n_slots, n_ctx=n_ctx)
    note(f"{pool.name}: {n_ctx} cells")
    with start_systems({QUEUE: settings}) as systems:
        prompts = Prompts(plan.seed, systems.n_vocab)
        systems.generate_one_by_one(prompts.several(2, 16), 4)  # warm up
        rounds = [time_cycles(systems, prompts.several(sizes.n_prompts, sizes.n_in), sizes) for _ in range(plan.rounds)]
        llama_server = systems.describe_llama_server()
    cycles = {str(number): merge_rounds(same) for number, same in enumerate(zip(*rounds, strict=True), start=1)}
    _show(pool, cycles)
    return {"n_ctx": n_ctx, **llama_server, "targets": check_targets(pool, cycles), "cycles": cycles}


def check_targets(pool: Pool, cycles: dict[str, Round]) -> Figures:
    """Compare the cycles after the first with the targets."""
    later = [cycle[QUEUE] for number, cycle in cycles.items() if number != "1"]
    targets = {"reused": check_target(min(one["reused"] for one in later), at_least=pool.target)}
    if "vs_peer" in later[0]:
        targets["vs_peer_second_cycle"] = check_target(later[0]["vs_peer"], at_most=VS_LLAMA_SERVER_TARGET)
    return targets


def measure(plan: Plan) -> Figures:
    """Return the figures of both pool sizes."""
    sizes = QUICK if plan.quick else FULL
    about = {"prompts": sizes.n_prompts, "slots": sizes.n_slots, "tokens_in": sizes.n_in, "tokens_out": sizes.n_out}
    return about | {pool.name: measure_pool(plan, pool, sizes) for pool in POOLS}


def _show(pool: Pool, cycles: dict[str, Round]) -> None:
    columns = ("cycle", "system", "reused", "computed", "wall s (range)", "of llama-server's", "TTFT p50 ms", "p95")
    rows = []
    for number, cycle in cycles.items():
        for name, one in cycle.items():
            counts, ttft = (f"{one['reused']:.1%}", round(one["computed_tokens"])), one["ttft_ms"]
            times = (format_range(one, "wall_s", 3), format_range(one, "vs_peer"), ttft["p50"], ttft["p95"])
            rows.append((number, name, *counts, *times))
    show(f"prompts in a cycle, {pool.name}", columns, rows)


if __name__ == "__main__":
    run(measure)
