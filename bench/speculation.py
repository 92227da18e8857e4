"""What does `--speculation ngram` bring where a text repeats itself, and what does it cost where it does not?

Two workers, one of them without speculation, run the same streamed jobs in turn: one job alone, and eight at once.
Prompts are random tokens. The random model does not repeat them, so grammars that allow one token at each position make
it write what a trained model writes:

- `edit`: the prompt again, in which every 24th token is replaced, as when code is edited.
- `extraction`: passages of 8 to 32 tokens from the prompt, with three other tokens between two of them.

Texts that speculation must not slow down:

- `greedy`, `sampled`: what the random model writes by itself, without repetitions.
- `misleading`: random draws from four tokens. The last tokens have always occurred before, but what followed them then
  tells little.

`speed_up` is tokens per second with speculation divided by those without, in the same round; `cpu_speed_up` is the same
for tokens per second of processor time of the worker, which other load on the machine changes less.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NamedTuple

from cpu_clock import CpuClock
from harness import Figures, Plan, Stack, note, run, show, start_stack
from job_timings import Timeline, median_of, summarize
from llamaq.common.protocol.job_request import JobOptions
from llamaq.producer import AsyncClient
from systems import check_target, range_of
from workload import Prompts, follow, greedy, sampled

OFF, ON = "off", "ngram"
EDIT_EVERY = 24
PASSAGE, N_BETWEEN = (8, 32), 3
N_MISLEADING = 4
REPEATING = ("edit", "extraction")
SPEED_UP_TARGET, COST_TARGET = 1.5, 0.97


class Sizes(NamedTuple):
    """What a run measures."""

    kinds: tuple[str, ...]
    numbers: tuple[int, ...]
    """How many jobs run at once."""
    n_in: int
    n_out: int


SIZES = Sizes(("edit", "extraction", "greedy", "sampled", "misleading"), (1, 8), 256, 256)
QUICK_SIZES = Sizes(("edit", "greedy"), (1,), 48, 32)

Options = Callable[[list[int]], JobOptions]
"""Returns the options of a job with this prompt."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The options that make the random model write texts of `n_out` tokens."""

    n_vocab: int
    n_out: int
    random: Random

    def kinds(self) -> dict[str, Options]:
        return {
            "edit": lambda prompt: self._forced(self._edited(prompt)),
            "extraction": lambda prompt: self._forced(self._extracted(prompt)),
            "greedy": lambda _: greedy(self.n_out),
            "sampled": lambda _: sampled(self.n_out),
            "misleading": self._misleading,
        }

    def _forced(self, tokens: Sequence[int]) -> JobOptions:
        """Return options with which each token is drafted and sampled. Without the bias, which is 0, the worker would
        compute the forced tokens without a draft.
        """
        text = "start: " + " ".join(f"<[{token}]>" for token in tokens[: self.n_out])
        return {"lark": text, "temperature": 0.0, "max_tokens": self.n_out, "logit_bias": {tokens[0]: 0.0}}

    def _other(self) -> int:
        return self.random.randrange(self.n_vocab // 2)

    def _edited(self, prompt: list[int]) -> list[int]:
        return [token if place % EDIT_EVERY else self._other() for place, token in enumerate(prompt, start=1)]

    def _extracted(self, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < self.n_out:
            n_tokens = self.random.randint(*PASSAGE)
            start = self.random.randrange(len(prompt) - n_tokens)
            tokens += prompt[start : start + n_tokens] + [self._other() for _ in range(N_BETWEEN)]
        return tokens

    def _misleading(self, prompt: list[int]) -> JobOptions:
        return {**sampled(self.n_out), "temperature": 1.0, "logit_bias": dict.fromkeys(prompt[:N_MISLEADING], 100.0)}


async def follow_each(
    jobs: Sequence[tuple[list[int], JobOptions]], client: AsyncClient
) -> tuple[list[Timeline], Figures]:
    """Run these jobs at once, and return their timelines and the counts of their drafts."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(follow(client, prompt, **options)) for prompt, options in jobs]
    timelines = [task.result() for task in running]
    stats = [(await client.job(one.job_id or "").result()).stats for one in timelines]
    counts = {name: sum(getattr(one, name) for one in stats) for name in ("drafted_tokens", "accepted_tokens")}
    return timelines, counts


def time_worker(
    stack: Stack, queue: str, jobs: Sequence[tuple[list[int], JobOptions]]
) -> tuple[Figures, list[list[int]]]:
    """Run these jobs at once, and return the figures and the tokens of each job."""
    clock = CpuClock(stack, queue)
    before = clock.read()
    timelines, counts = stack.run(partial(follow_each, jobs), queue)
    figures = summarize(timelines)
    cpu = clock.us_per_token(before, figures["tokens"])
    return {**figures, **counts, "cpu_us_per_token": cpu}, [one.tokens for one in timelines]


def time_both(stack: Stack, jobs: Sequence[tuple[list[int], JobOptions]], turn: int) -> Figures:
    """Run the jobs on both workers. With each `turn`, the other one is first."""
    measured = {queue: time_worker(stack, queue, jobs) for queue in ((OFF, ON) if turn % 2 else (ON, OFF))}
    (off, expected), (on, outputs) = measured[OFF], measured[ON]
    return {
        OFF: off,
        ON: on,
        "speed_up": round(on["tokens_per_s"] / off["tokens_per_s"], 4),
        "cpu_speed_up": round(off["cpu_us_per_token"]["worker"] / on["cpu_us_per_token"]["worker"], 4),
        "same_outputs": sum(one == other for one, other in zip(outputs, expected, strict=True)),
    }


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds by kind of text and number of jobs."""
    sizes = QUICK_SIZES if plan.quick else SIZES
    workers = [plan.settings(n_parallel=max(sizes.numbers), queue=name, speculation=name) for name in (OFF, ON)]
    rounds: dict[str, dict[str, list[Figures]]] = {}
    for turn in range(plan.rounds):
        # One of two equal workers can be slower by some per cent, because of where its memory is. So each round has
        # new workers.
        with start_stack(workers) as stack:
            for kind, number, figures in measure_round(stack, sizes, plan.seed + turn, turn, warms_up=not plan.quick):
                rounds.setdefault(kind, {}).setdefault(str(number), []).append(figures)
                ratios = f"{figures['speed_up']:.2f} times as fast, by processor {figures['cpu_speed_up']:.2f}"
                note(f"{kind}, {number} at once: {ratios}")
    texts = {
        kind: {number: median_of(done) | {"range": range_of(done, "speed_up")} for number, done in of.items()}
        for kind, of in rounds.items()
    }
    _show(texts)
    return {
        "slots": max(sizes.numbers),
        "tokens_in": sizes.n_in,
        "tokens_out": sizes.n_out,
        "texts": texts,
        "targets": _check(texts),
    }


def measure_round(
    stack: Stack, sizes: Sizes, seed: int, turn: int, *, warms_up: bool
) -> Iterator[tuple[str, int, Figures]]:
    """Yield the figures of each kind of text and each number of jobs, after other jobs of each kind if `warms_up`."""
    n_vocab = stack.worker.card.n_vocab
    prompts, kinds = Prompts(seed, n_vocab), Texts(n_vocab, sizes.n_out, Random(seed)).kinds()

    def draw(kind: str, number: int) -> list[tuple[list[int], JobOptions]]:
        return [(prompt, kinds[kind](prompt)) for prompt in prompts.several(number, sizes.n_in)]

    for kind in sizes.kinds if warms_up else ():
        time_both(stack, draw(kind, max(sizes.numbers)), turn)
    for kind in sizes.kinds:
        for number in sizes.numbers:
            yield kind, number, time_both(stack, draw(kind, number), turn)


def _check(texts: dict[str, Any]) -> Figures:
    """Return the targets: faster with one job where the text repeats itself, and never slower elsewhere."""
    return {
        f"{kind}_{number}": check_target(
            figures["speed_up"], at_least=SPEED_UP_TARGET if kind in REPEATING and number == "1" else COST_TARGET
        )
        for kind, by_number in texts.items()
        for number, figures in by_number.items()
    }


def _show(texts: dict[str, Any]) -> None:
    rows = []
    for kind, by_number in texts.items():
        for number, figures in by_number.items():
            off, on = figures[OFF], figures[ON]
            ratios = (f"{figures['speed_up']:.2f}", f"{figures['cpu_speed_up']:.2f}")
            counts = (on["drafted_tokens"], on["accepted_tokens"])
            rows.append((f"{kind}, {number}", off["tokens_per_s"], on["tokens_per_s"], *ratios, *counts))
    show("speculation", ("text, jobs", "off tok/s", "ngram tok/s", "speed-up", "by cpu", "drafted", "accepted"), rows)


if __name__ == "__main__":
    run(measure)
