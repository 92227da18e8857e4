"""1 to 16 jobs at once that begin alike, cold: how often is what they share computed, and how long do they take?

512 or 1,024 shared random tokens, then 32 of each job's own; 16 tokens out, greedy, streamed. Tokens are new in every
round, so nothing of it is in any cache, and llama-server's slots are emptied before (a worker keeps what it had).
`computed_per_distinct` is 1 when every token of the tree of prompts was computed once. `vs_peer` is wall time over
llama-server's in the same round; `vs_peer_same_speed` divides it by that of a job alone, which shares nothing, and so
takes out what the two builds of llama.cpp differ by.
"""

from __future__ import annotations

from harness import Figures, Plan, note, run, show
from systems import Round, Sides, distinct_tokens, over_rounds, said, sides, verdict, whole_blocks
from workload import Prompts

QUEUE = "llamaq"
NUMBERS, QUICK_NUMBERS = (1, 2, 4, 8, 16), (1, 4)
SHARED, QUICK_SHARED = (512, 1024), (128,)
N_OWN = 32
N_OUT, QUICK_N_OUT = 16, 8
DISTINCT_TARGET = 1.02
VS_PEER_TARGETS = {(1024, 16): 0.20, (512, 8): 0.40}


def time_jobs(over: Sides, prompts: Prompts, n_shared: int, number: int, n_out: int) -> Round:
    """One number of jobs at once, once on each side."""
    shared = prompts.tokens(n_shared)
    together = [shared + prompts.tokens(N_OWN) for _ in range(number)]
    for side in over.all.values():
        side.forget()
    one_round = over.ask(together, n_out)
    distinct = distinct_tokens(together)
    for figures in one_round.values():
        figures["computed_per_distinct"] = round(figures["computed_tokens"] / distinct, 4)
    times = ", ".join(f"{name} {figures['wall_s']} s" for name, figures in one_round.items())
    note(f"{number} jobs, {n_shared} shared: {times}")
    return one_round


def measure(plan: Plan) -> Figures:
    """Figures by shared length and number of jobs."""
    numbers, lengths = (QUICK_NUMBERS, QUICK_SHARED) if plan.quick else (NUMBERS, SHARED)
    n_out = QUICK_N_OUT if plan.quick else N_OUT
    n_cells = (max(numbers) + 1) * (max(lengths) + N_OWN + n_out)
    settings = plan.settings(n_parallel=max(numbers), n_ctx=whole_blocks(n_cells))
    rounds: dict[tuple[int, int], list[Round]] = {(length, number): [] for length in lengths for number in numbers}
    with sides({QUEUE: settings}) as over:
        prompts = Prompts(plan.seed, over.n_vocab)
        time_jobs(over, prompts, N_OWN, max(numbers), 4)  # warm up
        for _ in range(plan.rounds):
            for (length, number), figures in rounds.items():
                figures.append(time_jobs(over, prompts, length, number, n_out))
        peer = over.describe_peer()
    results = {key: over_rounds(figures) for key, figures in rounds.items()}
    add_same_speed(results)
    shared = {str(length): {str(number): results[length, number] for number in numbers} for length in lengths}
    _show(results)
    sizes = {"tokens_own": N_OWN, "tokens_out": n_out, "slots": settings.n_parallel, "n_ctx": settings.n_ctx}
    return sizes | peer | {"targets": judge(results), "shared": shared}


def add_same_speed(results: dict[tuple[int, int], Round]) -> None:
    """Each ratio over that of a job alone, with a prompt of the same length."""
    for (length, _), sides_of_one in results.items():
        worker = sides_of_one[QUEUE]
        if "vs_peer" in worker:
            alone = results[length, 1][QUEUE]["vs_peer"]
            worker["vs_peer_same_speed"] = round(worker["vs_peer"] / alone, 4)


def judge(results: dict[tuple[int, int], Round]) -> Figures:
    """What was to be shown, as far as it was measured."""
    most = results[max(results)][QUEUE]
    verdicts = {"computed_per_distinct": verdict(most["computed_per_distinct"], at_most=DISTINCT_TARGET)}
    for key, target in VS_PEER_TARGETS.items():
        if key in results and "vs_peer" in results[key][QUEUE]:
            name = f"vs_peer_{key[1]}_jobs_{key[0]}_shared"
            verdicts[name] = verdict(results[key][QUEUE]["vs_peer"], at_most=target)
    return verdicts


def _show(results: dict[tuple[int, int], Round]) -> None:
    columns = ("shared x jobs", "side", "wall s (range)", "of peer's", "same speed", "per distinct", "TTFT p50 ms")
    rows = []
    for (length, number), sides_of_one in results.items():
        for name, one in sides_of_one.items():
            same = one.get("vs_peer_same_speed")
            ratios = (said(one, "wall_s", 3), said(one, "vs_peer"), f"{same:.2f}" if same else "-")
            rows.append((f"{length} x {number}", name, *ratios, one["computed_per_distinct"], one["ttft_ms"]["p50"]))
    show("jobs with a common beginning", columns, rows)


if __name__ == "__main__":
    run(measure)
