"""What do text prompts cost other jobs, compared with the same prompts as token ids?

Four users stream. Meanwhile jobs with long prompts and one output token arrive. The prompts are text, which the worker
tokenizes (`text`), or token ids, which the caller made before the measurement (`ids`). The two variants run in turn,
and do the same work at the same points of progress. `alone` has the same users without long prompts. `encode_ms` is the
time to tokenize one prompt on an idle thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cpu_clock import CpuClock
from harness import Figures, Plan, Stack, note, run, show, start_stack
from job_mixes import Interactive
from job_timings import median_of
from llamaq.producer import Tokenizer
from workload import Prompt, Prompts

N_PARALLEL = 8
N_USERS, JOBS_PER_USER, USER_IN, USER_OUT = 4, 3, 32, 128
N_LONG, LONG_TOKENS = 8, 1000
QUICK_JOBS_PER_USER, QUICK_USER_OUT, QUICK_N_LONG, QUICK_LONG_TOKENS = 1, 32, 3, 100


def time_variant(stack: Stack, long: Sequence[Prompt], prompts: Prompts, *, quick: bool) -> dict[str, Any]:
    """Run the users with these long prompts and return the figures."""
    n_jobs, n_out = (QUICK_JOBS_PER_USER, QUICK_USER_OUT) if quick else (JOBS_PER_USER, USER_OUT)
    mix = Interactive([prompts.several(n_jobs, USER_IN) for _ in range(N_USERS)], long, n_out, long_out=1)
    clock = CpuClock(stack)
    before = clock.read()
    figures = stack.run(mix.run)
    return figures | {"cpu_us_per_token": clock.us_per_token(before, figures["all"]["tokens"])}


def time_round(stack: Stack, tokenizer: Tokenizer, prompts: Prompts, *, quick: bool) -> dict[str, Any]:
    """Run one round of `alone`, `text` and `ids` and return the figures."""
    n_long, length = (QUICK_N_LONG, QUICK_LONG_TOKENS) if quick else (N_LONG, LONG_TOKENS)
    texts = [prompts.text(length, tokenizer) for _ in range(n_long)]
    start_s = time.perf_counter()
    ids = [tokenizer.encode(text) for text in texts]
    encode_ms = (time.perf_counter() - start_s) * 1000 / n_long
    variants: dict[str, Sequence[Prompt]] = {"alone": [], "text": texts, "ids": ids}
    figures = {name: time_variant(stack, long, prompts, quick=quick) for name, long in variants.items()}
    note("tokens/s: " + ", ".join(f"{name} {one['all']['tokens_per_s']}" for name, one in figures.items()))
    means = {"prompt_tokens": sum(map(len, ids)) / n_long, "prompt_chars": sum(map(len, texts)) / n_long}
    return {**means, "encode_ms": round(encode_ms, 3), **figures}


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds."""
    with start_stack([plan.settings(n_parallel=N_PARALLEL)]) as stack:
        tokenizer = stack.run(lambda client: client.tokenizer())
        prompts = Prompts(plan.seed, stack.worker.card.n_vocab)
        time_variant(stack, [], prompts, quick=True)  # warm up
        figures = median_of([time_round(stack, tokenizer, prompts, quick=plan.quick) for _ in range(plan.rounds)])
    _show(figures)
    return {"slots": N_PARALLEL, "users": N_USERS, **figures}


def _show(figures: dict[str, Any]) -> None:
    rows = []
    for variant in ("alone", "text", "ids"):
        one = figures[variant]
        long = one["long"]["ttft_ms"]["p50"] if "long" in one else ""
        rows.append((variant, one["all"]["wall_s"], one["all"]["tokens_per_s"], *one["short"]["itl_ms"].values(), long))
    show(
        f"prompts of {figures['prompt_tokens']:.0f} tokens, {figures['encode_ms']:.2f} ms to tokenize one",
        ("long prompts", "wall s", "tok/s", "users' ITL p50", "p95", "p99", "max ms", "long TTFT p50"),
        rows,
    )


if __name__ == "__main__":
    run(measure)
