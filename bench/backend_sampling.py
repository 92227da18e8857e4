"""What does `--backend-sampling` bring on a GPU, and what does it cost on a CPU?

Two workers, one of them with backend sampling, run the same streamed jobs in turn: 1, 8 and 32 jobs at once, greedy and
sampled, and once more with one job in eight that needs all logits (`mixed`).

`speed_up` is tokens per second with backend sampling divided by those without, in the same round. Without it, each
tick copies 4 bytes from the GPU for each token of the vocabulary and each slot: 19 MB with a vocabulary of 151,936
tokens and 32 slots.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from harness import Figures, Plan, Stack, note, run, show, start_stack
from job_timings import median_of, summarize
from llamaq.common.protocol.job_options import JobOptions
from speculation import Work, follow_each
from systems import range_of
from workload import Prompts, greedy, sampled

OFF, ON = "off", "on"
NUMBERS, QUICK_NUMBERS = (1, 8, 32), (1, 2)
N_IN, N_OUT = 64, 128
QUICK_N_IN, QUICK_N_OUT = 16, 16
ALL_LOGITS_EVERY = 8
"""In `mixed`, one job of this number has no top-k, so it needs all logits."""


def options_of(kind: str, index: int, n_out: int) -> JobOptions:
    """Return the options of a job."""
    if kind == "greedy":
        return greedy(n_out)
    if kind == "mixed" and index % ALL_LOGITS_EVERY == 0:
        return {**sampled(n_out), "top_k": 0}
    return sampled(n_out)


def time_both(stack: Stack, jobs: list[Work], turn: int) -> Figures:
    """Run the jobs on both workers. With each `turn`, the other one is first."""
    measured: dict[str, Any] = {}
    for queue in (OFF, ON) if turn % 2 else (ON, OFF):
        measured[queue] = summarize(stack.run(partial(follow_each, jobs), queue)[0])
    return {**measured, "speed_up": round(measured[ON]["tokens_per_s"] / measured[OFF]["tokens_per_s"], 4)}


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds by kind and number of jobs."""
    numbers = QUICK_NUMBERS if plan.quick else NUMBERS
    n_in, n_out = (QUICK_N_IN, QUICK_N_OUT) if plan.quick else (N_IN, N_OUT)
    workers = [plan.settings(n_parallel=max(numbers), queue=queue, backend_sampling=queue == ON) for queue in (OFF, ON)]
    rounds: dict[str, dict[str, list[Figures]]] = {}
    with start_stack(workers) as stack:
        prompts = Prompts(plan.seed, stack.worker.card.n_vocab)
        for turn in range(-1, plan.rounds):  # the first one warms up
            for kind in ("greedy", "sampled", "mixed"):
                for number in numbers:
                    drawn = enumerate(prompts.several(number, n_in))
                    one = time_both(
                        stack, [Work(prompt, options_of(kind, index, n_out)) for index, prompt in drawn], turn
                    )
                    if turn >= 0:
                        rounds.setdefault(kind, {}).setdefault(str(number), []).append(one)
                        note(f"{kind}, {number} at once: {one['speed_up']:.2f} times as fast")
    figures = {
        kind: {number: median_of(done) | {"range": range_of(done, "speed_up")} for number, done in of.items()}
        for kind, of in rounds.items()
    }
    rows = [
        (f"{kind}, {number}", one[OFF]["tokens_per_s"], one[ON]["tokens_per_s"], f"{one['speed_up']:.2f}")
        for kind, of in figures.items()
        for number, one in of.items()
    ]
    show("backend sampling", ("jobs", "off tok/s", "on tok/s", "speed-up"), rows)
    return {"slots": max(numbers), "tokens_in": n_in, "tokens_out": n_out, "jobs": figures}


if __name__ == "__main__":
    run(measure)
