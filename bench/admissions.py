"""How long does the scheduler take to give slots to many waiting jobs, while all streams wait?

The scheduler and the KV memory are the real ones, the engine computes nothing. All slots are idle, and twice as many
jobs as slots wait. `no_cache`: jobs with three tokens that share nothing. `shared`: prompts of 1,000 tokens, of which
the first 500 are the same. `us_per_admission` is the time of the whole burst divided by the number of slots.
"""

from __future__ import annotations

import time
from typing import Any

from harness import Figures, Plan, note, run, show
from job_timings import median_of
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.testing import FakeEngine, make_job, make_memory, make_scheduler
from workload import Prompts

N_SLOTS, QUICK_N_SLOTS = (8, 32, 128), (4,)
N_VOCAB = 1000
N_SHARED, N_OWN, N_SHORT = 500, 500, 3
REPEATS = 5


def time_burst(prompts: Prompts, n_slots: int, kind: str) -> float:
    """Return the microseconds for each admission of one burst."""
    caches = kind == "shared"
    engine = FakeEngine(n_ctx=n_slots * 2 * (N_SHARED + N_OWN), n_batch=2048, n_seq_max=2 * n_slots)
    memory = make_memory(engine, n_slots=n_slots, cache=RadixPrefixCache() if caches else None)
    scheduler = make_scheduler(engine, memory)
    shared, n_own = (prompts.tokens(N_SHARED), N_OWN) if caches else ([], N_SHORT)
    for _ in range(2 * n_slots):
        scheduler.submit(make_job(shared + prompts.tokens(n_own), max_tokens=5, cache_prompt=caches))
    started_s = time.perf_counter()
    scheduler.admit()
    return (time.perf_counter() - started_s) * 1e6 / n_slots


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds, by kind of jobs and number of slots."""
    prompts, rounds = Prompts(plan.seed, N_VOCAB), []
    for _ in range(plan.rounds):
        one_round: dict[str, Any] = {
            kind: {
                str(n): {"us_per_admission": round(min(time_burst(prompts, n, kind) for _ in range(REPEATS)), 1)}
                for n in (QUICK_N_SLOTS if plan.quick else N_SLOTS)
            }
            for kind in ("no_cache", "shared")
        }
        note(f"us for each admission: {one_round}")
        rounds.append(one_round)
    figures: dict[str, Any] = median_of(rounds)
    rows = [(kind, *(one["us_per_admission"] for one in each.values())) for kind, each in figures.items()]
    show("us for each admission", ("jobs", *(f"{n} slots" for n in figures["shared"])), rows)
    return figures


if __name__ == "__main__":
    run(measure)
