"""A chat of four turns, with the prefix cache and without: what does a user wait for?

256 random tokens first, 48 more in each later turn, answers of 64 tokens, greedy, streamed; each turn's prompt is all
that was said before and the new tokens, with the side's own answers. Chats run one after the other, each with the
cache (`on`), then the same again without (`off`: a worker with `--no-cache-prompt`, llama-server with
`cache_prompt: false`). `extra_tokens` is what a turn computed beyond its new tokens: the last token of an answer has
never been computed, so one is right. `speed_up` divides latencies without the cache by those with it, over all turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from harness import Figures, Plan, note, run, show
from job_timings import Answer, median_of
from systems import PEER, Side, Sides, range_of, sides, verdict
from workload import Prompts

N_FIRST, QUICK_N_FIRST = 256, 64
N_NEXT, QUICK_N_NEXT = 48, 16
N_OUT, QUICK_N_OUT = 64, 8
N_TURNS = 4
N_CHATS, QUICK_N_CHATS = 3, 1
N_CTX = 4096
ON, OFF = "llamaq", "llamaq-off"

Ask = Callable[[list[int]], Answer]


def chat(ask: Ask, said_by_user: Sequence[list[int]]) -> list[Figures]:
    """One chat; the figures of its turns."""
    turns, history = [], list[int]()
    for new in said_by_user:
        answer = ask(history + new)
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


def ways(over: Sides, n_out: int) -> dict[str, dict[str, Ask]]:
    """How to ask each side, with the cache and without."""

    def asking(side: Side, *, cache_prompt: bool) -> Ask:
        return lambda prompt: side.ask([prompt], n_out, cache_prompt=cache_prompt)[0]

    workers = over.workers
    found = {ON: {"on": asking(workers[ON], cache_prompt=True), "off": asking(workers[OFF], cache_prompt=True)}}
    if over.peer:
        found[PEER] = {"on": asking(over.peer, cache_prompt=True), "off": asking(over.peer, cache_prompt=False)}
    return found


def time_round(asks: dict[str, dict[str, Ask]], chats: Sequence[Sequence[list[int]]]) -> dict[str, Figures]:
    """The same chats on every side, with and without the cache: medians by turn, and the speed-up."""
    turns: dict[str, dict[str, list[list[Figures]]]] = {
        name: {way: [] for way in by_way} for name, by_way in asks.items()
    }
    for said_by_user in chats:
        for name, by_way in asks.items():
            for way, ask in by_way.items():
                turns[name][way].append(chat(ask, said_by_user))
    figures = {name: _compare(by_way) for name, by_way in turns.items()}
    note(", ".join(f"{name} {one['speed_up']['mean']:.2f} times faster" for name, one in figures.items()))
    return figures


def _compare(by_way: dict[str, list[list[Figures]]]) -> Figures:
    figures: Figures = {way: _by_turn(chats) for way, chats in by_way.items()}
    on, off = ([turn["latency_ms"] for one in by_way[way] for turn in one] for way in ("on", "off"))
    mean, median = statistics.mean(off) / statistics.mean(on), statistics.median(off) / statistics.median(on)
    figures["speed_up"] = {"mean": round(mean, 3), "median": round(median, 3)}
    figures["most_extra_tokens"] = max(turn["extra_tokens"] for one in by_way["on"] for turn in one[1:])
    return figures


def _by_turn(chats: list[list[Figures]]) -> Figures:
    return {str(number): median_of(turns) for number, turns in enumerate(zip(*chats, strict=True), start=1)}


def measure(plan: Plan) -> Figures:
    """Medians over the rounds."""
    n_first, n_next = (QUICK_N_FIRST, QUICK_N_NEXT) if plan.quick else (N_FIRST, N_NEXT)
    n_out, n_chats = (QUICK_N_OUT, QUICK_N_CHATS) if plan.quick else (N_OUT, N_CHATS)
    workers = {ON: plan.settings(n_ctx=N_CTX), OFF: plan.settings(n_ctx=N_CTX, cache_prompt=False)}
    with sides(workers) as over:
        prompts, asks = Prompts(plan.seed, over.n_vocab), ways(over, n_out)

        def draw(count: int) -> list[list[list[int]]]:
            later = N_TURNS - 1
            return [[prompts.tokens(n_first), *prompts.several(later, n_next)] for _ in range(count)]

        time_round(asks, draw(1))  # warm up
        rounds = [time_round(asks, draw(n_chats)) for _ in range(plan.rounds)]
        peer = over.describe_peer()
    results = {name: merge([one[name] for one in rounds]) for name in asks}
    _show(results)
    sizes = {"tokens_first": n_first, "tokens_next": n_next, "tokens_out": n_out, "chats": n_chats}
    targets = {"most_extra_tokens": verdict(results[ON]["most_extra_tokens"], at_most=1)}
    return sizes | peer | {"targets": targets, "sides": results}


def merge(rounds: list[Figures]) -> Figures:
    """Medians, the range of the speed-up, and the largest of what should not be."""
    speed_ups = [one["speed_up"] for one in rounds]
    most = max(one["most_extra_tokens"] for one in rounds)
    return median_of(rounds) | {"speed_up_range": range_of(speed_ups, "mean"), "most_extra_tokens": most}


def _show(results: dict[str, Figures]) -> None:
    columns = ("turn", "side", "prompt", "computed", "without", "ms", "without", "TTFT ms", "without")
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
    show("faster with the cache", ("side", "mean (range)", "median"), ratios)


if __name__ == "__main__":
    run(measure)
