"""n + 1 prompts that come again and again to n slots: is any of them ever computed twice?

11 prompts of 512 random tokens over 10 slots, one after the other, 16 tokens out each, greedy, streamed; three cycles,
in each of which every side gets all prompts, one side after the other. Prompts are new in every round. Once with cells
for all of them (`all_in_cells`), once with cells for half of them (`half_in_cells`). Both sides have host memory for
all of them and use it either way: llama-server empties idle slots when a task begins, and a worker keeps no more than
`held_cells` beside running jobs, which is its default here. `reused` is the share of the prompts' tokens that needed no
computing, `vs_peer` the ratio of the times: in the first cycle nobody can reuse anything, so it says there what the two
builds of llama.cpp differ by.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness import Figures, Plan, note, run, show
from systems import Round, Sides, over_rounds, said, sides, verdict, whole_blocks
from workload import Prompts

QUEUE = "llamaq"
VS_PEER_TARGET = 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What comes in a cycle."""

    n_slots: int
    n_in: int
    n_out: int
    n_cycles: int

    @property
    def n_prompts(self) -> int:
        return self.n_slots + 1

    def n_ctx(self, share: float) -> int:
        """Cells for this share of the prompts and their answers."""
        return whole_blocks(share * (self.n_in + self.n_out))


FULL = Sizes(n_slots=10, n_in=512, n_out=16, n_cycles=3)
QUICK = Sizes(n_slots=2, n_in=240, n_out=8, n_cycles=2)


@dataclass(frozen=True, slots=True)
class Pool:
    """How many of the prompts there are cells for, and what is to be reused from the second cycle on."""

    name: str
    share: float
    target: float


POOLS = (Pool("all_in_cells", 1.0, 0.99), Pool("half_in_cells", 0.5, 0.95))


def time_cycles(over: Sides, prompts: list[list[int]], sizes: Sizes) -> list[Round]:
    """Every cycle of one round."""
    cycles = []
    for number in range(1, sizes.n_cycles + 1):
        cycles.append(over.ask_each(prompts, sizes.n_out))
        reused = ", ".join(f"{name} {one['wall_s']} s, {one['reused']:.1%} reused" for name, one in cycles[-1].items())
        note(f"cycle {number}: {reused}")
    return cycles


def measure_pool(plan: Plan, pool: Pool, sizes: Sizes) -> Figures:
    """Figures by cycle, with one number of cells."""
    # All: and one more, for the prompt that runs while the others are held.
    n_ctx = sizes.n_ctx(sizes.n_prompts + 1 if pool.share == 1 else sizes.n_prompts * pool.share)
    settings = plan.settings(n_parallel=sizes.n_slots, n_ctx=n_ctx)
    note(f"{pool.name}: {n_ctx} cells")
    with sides({QUEUE: settings}) as over:
        prompts = Prompts(plan.seed, over.n_vocab)
        over.ask_each(prompts.several(2, 16), 4)  # warm up
        rounds = [time_cycles(over, prompts.several(sizes.n_prompts, sizes.n_in), sizes) for _ in range(plan.rounds)]
        peer = over.describe_peer()
    cycles = {str(number): over_rounds(same) for number, same in enumerate(zip(*rounds, strict=True), start=1)}
    _show(pool, cycles)
    return {"n_ctx": n_ctx, **peer, "targets": judge(pool, cycles), "cycles": cycles}


def judge(pool: Pool, cycles: dict[str, Round]) -> Figures:
    """What was to be shown, of the cycles after the first."""
    later = [cycle[QUEUE] for number, cycle in cycles.items() if number != "1"]
    verdicts = {"reused": verdict(min(one["reused"] for one in later), at_least=pool.target)}
    if "vs_peer" in later[0]:
        verdicts["vs_peer_second_cycle"] = verdict(later[0]["vs_peer"], at_most=VS_PEER_TARGET)
    return verdicts


def measure(plan: Plan) -> Figures:
    """Figures of both pools."""
    sizes = QUICK if plan.quick else FULL
    about = {"prompts": sizes.n_prompts, "slots": sizes.n_slots, "tokens_in": sizes.n_in, "tokens_out": sizes.n_out}
    return about | {pool.name: measure_pool(plan, pool, sizes) for pool in POOLS}


def _show(pool: Pool, cycles: dict[str, Round]) -> None:
    columns = ("cycle", "side", "reused", "computed", "wall s (range)", "of peer's (range)", "TTFT p50 ms", "p95")
    rows = []
    for number, cycle in cycles.items():
        for name, one in cycle.items():
            counts, ttft = (f"{one['reused']:.1%}", round(one["computed_tokens"])), one["ttft_ms"]
            times = (said(one, "wall_s", 3), said(one, "vs_peer"), ttft["p50"], ttft["p95"])
            rows.append((number, name, *counts, *times))
    show(f"prompts in a cycle, {pool.name}", columns, rows)


if __name__ == "__main__":
    run(measure)
