"""How long does a user of a chat with four turns wait, with the prefix cache and without it?

The first turn has 256 random tokens, each later turn 48 more tokens. Answers have 64 tokens, greedy and streamed. The
prompt of a turn is the whole history, with the answers of the measured system, and the new tokens. Chats run one after
the other, each with the cache (`on`) and then without the cache (`off`: a worker with `--no-cache-prompt`, llama-server
with `cache_prompt: false`).

`extra_tokens` is the number of tokens that a turn computed beyond its new tokens. The expected value is one, because
the last token of an answer is decoded only in the next turn, as part of the prompt. `speed_up` is the latency without
the cache divided by the latency with it, over all turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from harness import Figures, Plan, note, run, show
from job_timings import Answer, median_of
from systems import LLAMA_SERVER, System, Systems, check_target, range_of, start_systems
from workload import Prompts

N_FIRST, QUICK_N_FIRST = 256, 64
N_NEXT, QUICK_N_NEXT = 48, 16
N_OUT, QUICK_N_OUT = 64, 8
N_TURNS = 4
N_CHATS, QUICK_N_CHATS = 3, 1
N_CTX = 4096
ON, OFF = "llamaq", "llamaq-off"

Generate = Callable[[list[int]], Answer]
"""Generates an answer to a prompt."""


def chat(generate: Generate, user_turns: Sequence[list[int]]) -> list[Figures]:
    """Run one chat and return the figures of its turns."""
    turns, history = [], list[int]()
    for new in user_turns:
        answer = generate(history + new)
        turns.append(
            {
                "prompt_tokens": answer.prompt_tokens,
                "computed_tokens": answer.computed_tokens,
                "extra_tokens": answer.computed_tokens - len(new),
                "latency_ms": answer.timeline.latency_ms,
                "ttft_ms": answer.timeline.ttft_ms,
            }
        )
        history += new + answer.timeline.tokens
    return turns


def generators(systems: Systems, n_out: int) -> dict[str, dict[str, Generate]]:
    """Return two functions for each system: one generates with the cache (`on`), one without it (`off`)."""

    def generator(system: System, *, cache_prompt: bool) -> Generate:
        return lambda prompt: system.generate([prompt], n_out, cache_prompt=cache_prompt)[0]

    workers = systems.workers
    found = {ON: {"on": generator(workers[ON], cache_prompt=True), "off": generator(workers[OFF], cache_prompt=True)}}
    if server := systems.llama_server:
        found[LLAMA_SERVER] = {
            "on": generator(server, cache_prompt=True),
            "off": generator(server, cache_prompt=False),
        }
    return found


def time_round(by_system: dict[str, dict[str, Generate]], chats: Sequence[Sequence[list[int]]]) -> dict[str, Figures]:
    """Run the same chats on every system, with and without the cache; return medians by turn, and the speed-up."""
    turns: dict[str, dict[str, list[list[Figures]]]] = {name: {"on": [], "off": []} for name in by_system}
    for user_turns in chats:
        for name, on_and_off in by_system.items():
            for mode, generate in on_and_off.items():
                turns[name][mode].append(chat(generate, user_turns))
    figures = {name: _compare(on_and_off) for name, on_and_off in turns.items()}
    note(", ".join(f"{name} {one['speed_up']['mean']:.2f} times faster" for name, one in figures.items()))
    return figures


def _compare(on_and_off: dict[str, list[list[Figures]]]) -> Figures:
    figures: Figures = {mode: _by_turn(chats) for mode, chats in on_and_off.items()}
    on, off = ([turn["latency_ms"] for one in on_and_off[mode] for turn in one] for mode in ("on", "off"))
    mean, median = statistics.mean(off) / statistics.mean(on), statistics.median(off) / statistics.median(on)
    figures["speed_up"] = {"mean": round(mean, 3), "median": round(median, 3)}
    figures["most_extra_tokens"] = max(turn["extra_tokens"] for one in on_and_off["on"] for turn in one[1:])
    return figures


def _by_turn(chats: list[list[Figures]]) -> Figures:
    return {str(number): median_of(turns) for number, turns in enumerate(zip(*chats, strict=True), start=1)}


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds."""
    n_first, n_next = (QUICK_N_FIRST, QUICK_N_NEXT) if plan.quick else (N_FIRST, N_NEXT)
    n_out, n_chats = (QUICK_N_OUT, QUICK_N_CHATS) if plan.quick else (N_OUT, N_CHATS)
    workers = {ON: plan.settings(n_ctx=N_CTX), OFF: plan.settings(n_ctx=N_CTX, cache_prompt=False)}
    with start_systems(workers) as systems:
        prompts, by_system = Prompts(plan.seed, systems.n_vocab), generators(systems, n_out)

        def draw(count: int) -> list[list[list[int]]]:
            later = N_TURNS - 1
            return [[prompts.tokens(n_first), *prompts.several(later, n_next)] for _ in range(count)]

        time_round(by_system, draw(1))  # warm up
        rounds = [time_round(by_system, draw(n_chats)) for _ in range(plan.rounds)]
        llama_server = systems.describe_llama_server()
    results = {name: merge([one[name] for one in rounds]) for name in by_system}
    _show(results)
    sizes = {"tokens_first": n_first, "tokens_next": n_next, "tokens_out": n_out, "chats": n_chats}
    targets = {"most_extra_tokens": check_target(results[ON]["most_extra_tokens"], at_most=1)}
    return sizes | llama_server | {"targets": targets, "sides": results}


def merge(rounds: list[Figures]) -> Figures:
    """Return the medians, the range of the speed-up, and the largest number of extra tokens."""
    speed_ups = [one["speed_up"] for one in rounds]
    most = max(one["most_extra_tokens"] for one in rounds)
    return median_of(rounds) | {"speed_up_range": range_of(speed_ups, "mean"), "most_extra_tokens": most}


def _show(results: dict[str, Figures]) -> None:
    columns = ("turn", "system", "prompt", "computed", "without", "ms", "without", "TTFT ms", "without")
    rows: list[tuple[object, ...]] = []
    for number in range(1, N_TURNS + 1):
        for name, one in results.items():
            on, off = one["on"][str(number)], one["off"][str(number)]
            counts = [round(figure) for figure in (on["prompt_tokens"], on["computed_tokens"], off["computed_tokens"])]
            rows.append((number, name, *counts, on["latency_ms"], off["latency_ms"], on["ttft_ms"], off["ttft_ms"]))
    show(f"a chat of {N_TURNS} turns, with the cache and without", columns, rows)
    ratios = []
    for name, one in results.items():
        (low, high), mean, median = one["speed_up_range"], one["speed_up"]["mean"], one["speed_up"]["median"]
        ratios.append((name, f"{mean:.2f} ({low:.2f}-{high:.2f})", f"{median:.2f}"))
    show("faster with the cache", ("system", "mean (range)", "median"), ratios)


if __name__ == "__main__":
    run(measure)
