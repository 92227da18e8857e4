"""What does `--kv-unified` cost: one KV cache for all slots, compared with a cache for each slot?

A worker needs the unified cache to share prefixes between slots. Two bare loops run in turn, one with each kind of
cache, with 1, 8 and 32 sequences: short sequences (64 tokens in, 128 out) and long ones (1,500 in, 128 out).

`unified_speed` is tokens per second of the decode ticks with the unified cache divided by those without, in the same
round. The prefill is not in it; `prefill_ratio` compares its time.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from bare_loop import BareLoop, BareRun
from harness import Figures, Plan, note, run, show
from job_timings import median_of
from systems import range_of, round_up_to_cell_block
from workload import Prompts

NUMBERS, QUICK_NUMBERS = (1, 8, 32), (1, 2)
LENGTHS, QUICK_LENGTHS = {"short": 64, "long": 1500}, {"short": 16}
N_OUT, QUICK_N_OUT = 128, 16


def decode_rate(done: BareRun) -> float:
    """Return the tokens per second after the first token of each sequence."""
    return len(done.tokens) * len(done.tick_s) / sum(done.tick_s)


def time_both(loops: dict[str, BareLoop], prompts: list[list[int]], n_out: int, turn: int) -> Figures:
    """Run the prompts with both kinds of cache. With each `turn`, the other one is first."""
    done = {name: loops[name].run(prompts, n_out) for name in (sorted(loops) if turn % 2 else sorted(loops)[::-1])}
    rates = {name: decode_rate(done[name]) for name in loops}
    return {
        **{name: round(rate, 1) for name, rate in rates.items()},
        "unified_speed": round(rates["unified"] / rates["separate"], 4),
        "prefill_ratio": round(done["unified"].prefill_s / done["separate"].prefill_s, 4),
    }


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds by length and number of sequences."""
    numbers, lengths, n_out = (QUICK_NUMBERS, QUICK_LENGTHS, QUICK_N_OUT) if plan.quick else (NUMBERS, LENGTHS, N_OUT)
    n_cells = max(numbers) * round_up_to_cell_block(max(lengths.values()) + n_out)
    rounds: dict[str, dict[str, list[Figures]]] = {}
    with ExitStack() as exits:
        loops = {
            name: exits.enter_context(
                BareLoop(plan.settings(n_parallel=max(numbers), n_ctx=n_cells, kv_unified=name == "unified"))
            )
            for name in ("unified", "separate")
        }
        prompts = Prompts(plan.seed, loops["unified"].n_vocab)
        for turn in range(-1, plan.rounds):  # the first one warms up
            for length, n_in in lengths.items():
                for number in numbers:
                    one = time_both(loops, prompts.several(number, n_in), n_out, turn)
                    if turn >= 0:
                        rounds.setdefault(length, {}).setdefault(str(number), []).append(one)
                        note(f"{length}, {number} sequences: unified {one['unified_speed']:.3f} times as fast")
    figures: dict[str, Any] = {
        length: {number: median_of(done) | {"range": range_of(done, "unified_speed")} for number, done in of.items()}
        for length, of in rounds.items()
    }
    rows = [
        (f"{length}, {number}", one["separate"], one["unified"], f"{one['unified_speed']:.3f}", one["prefill_ratio"])
        for length, of in figures.items()
        for number, one in of.items()
    ]
    show("decode, tokens per second", ("sequences", "separate", "unified", "speed", "prefill"), rows)
    return {"cells": n_cells, "tokens_in": lengths, "tokens_out": n_out, "sequences": figures}


if __name__ == "__main__":
    run(measure)
