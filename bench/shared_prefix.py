"""How often is the shared prefix of 1 to 16 jobs computed, and how long do the jobs take?

A prompt has 512 or 1,024 shared random tokens and then 32 tokens that no other prompt has. A job has 16 output tokens,
greedy and streamed. Each round has new tokens, so none of them is in a cache. llama-server's slots are erased before
each measurement; a worker keeps its cache.

`computed_per_distinct` is 1 if every token of the prompts' prefix tree was computed once. `vs_peer` is the wall time
divided by llama-server's in the same round. `vs_peer_same_speed` is `vs_peer` divided by the `vs_peer` of a single
job. A single job shares no tokens, so this division removes the difference between the two builds of llama.cpp.
"""

from __future__ import annotations

from harness import Figures, Plan, note, run, show
from systems import (
    Round,
    Systems,
    check_target,
    distinct_tokens,
    format_range,
    merge_rounds,
    round_up_to_cell_block,
    start_systems,
)
from workload import Prompts

QUEUE = "llamaq"
NUMBERS, QUICK_NUMBERS = (1, 2, 4, 8, 16), (1, 4)
SHARED, QUICK_SHARED = (512, 1024), (128,)
N_OWN = 32
N_OUT, QUICK_N_OUT = 16, 8
DISTINCT_TARGET = 1.02
VS_LLAMA_SERVER_TARGETS = {(1024, 16): 0.20, (512, 8): 0.40}


def time_jobs(systems: Systems, prompts: Prompts, n_shared: int, number: int, n_out: int) -> Round:
    """Run `number` jobs at the same time, on one system after the other."""
    shared = prompts.tokens(n_shared)
    together = [shared + prompts.tokens(N_OWN) for _ in range(number)]
    for system in systems.all.values():
        system.clear_cache()
    one_round = systems.generate_together(together, n_out)
    distinct = distinct_tokens(together)
    for figures in one_round.values():
        figures["computed_per_distinct"] = round(figures["computed_tokens"] / distinct, 4)
    times = ", ".join(f"{name} {figures['wall_s']} s" for name, figures in one_round.items())
    note(f"{number} jobs, {n_shared} shared: {times}")
    return one_round


def measure(plan: Plan) -> Figures:
    """Return the figures by shared length and number of jobs."""
    numbers, lengths = (QUICK_NUMBERS, QUICK_SHARED) if plan.quick else (NUMBERS, SHARED)
    n_out = QUICK_N_OUT if plan.quick else N_OUT
    n_cells = (max(numbers) + 1) * (max(lengths) + N_OWN + n_out)
    settings = plan.settings(n_parallel=max(numbers), n_ctx=round_up_to_cell_block(n_cells))
    rounds: dict[tuple[int, int], list[Round]] = {(length, number): [] for length in lengths for number in numbers}
    with start_systems({QUEUE: settings}) as systems:
        prompts = Prompts(plan.seed, systems.n_vocab)
        time_jobs(systems, prompts, N_OWN, max(numbers), 4)  # warm up
        for _ in range(plan.rounds):
            for (length, number), figures in rounds.items():
                figures.append(time_jobs(systems, prompts, length, number, n_out))
        llama_server = systems.describe_llama_server()
    results = {key: merge_rounds(figures) for key, figures in rounds.items()}
    add_same_speed(results)
    shared = {str(length): {str(number): results[length, number] for number in numbers} for length in lengths}
    _show(results)
    sizes = {"tokens_own": N_OWN, "tokens_out": n_out, "slots": settings.n_parallel, "n_ctx": settings.n_ctx}
    return sizes | llama_server | {"targets": check_targets(results), "shared": shared}


def add_same_speed(results: dict[tuple[int, int], Round]) -> None:
    """Divide each ratio by the ratio of a single job with a prompt of the same length."""
    for (length, _), one_round in results.items():
        worker = one_round[QUEUE]
        if "vs_peer" in worker:
            alone = results[length, 1][QUEUE]["vs_peer"]
            worker["vs_peer_same_speed"] = round(worker["vs_peer"] / alone, 4)


def check_targets(results: dict[tuple[int, int], Round]) -> Figures:
    """Compare the measured figures with the targets."""
    largest = results[max(results)][QUEUE]
    targets = {"computed_per_distinct": check_target(largest["computed_per_distinct"], at_most=DISTINCT_TARGET)}
    for key, most_ratio in VS_LLAMA_SERVER_TARGETS.items():
        if key in results and "vs_peer" in results[key][QUEUE]:
            name = f"vs_peer_{key[1]}_jobs_{key[0]}_shared"
            targets[name] = check_target(results[key][QUEUE]["vs_peer"], at_most=most_ratio)
    return targets


def _show(results: dict[tuple[int, int], Round]) -> None:
    columns = (
        "shared x jobs",
        "system",
        "wall s (range)",
        "of llama-server's",
        "same speed",
        "per distinct",
        "TTFT p50 ms",
    )
    rows = []
    for (length, number), one_round in results.items():
        for name, one in one_round.items():
            same = one.get("vs_peer_same_speed")
            ratios = (format_range(one, "wall_s", 3), format_range(one, "vs_peer"), f"{same:.2f}" if same else "-")
            rows.append((f"{length} x {number}", name, *ratios, one["computed_per_distinct"], one["ttft_ms"]["p50"]))
    show("jobs with a shared prefix", columns, rows)


if __name__ == "__main__":
    run(measure)
