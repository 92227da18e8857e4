"""What does `--speculation ngram` bring where a text repeats itself, and what does it cost where it does not?

Two workers, one of them without speculation, run the same streamed jobs in turn: one job alone, and eight at once. One
job alone takes little time, so it runs several times in each round, with another text each time. The random model
counts: after token t it writes token t + 1. So prompts are made for the texts that a trained model writes:

- `edit`: the prompt again, in which every 24th token is replaced, as when code is edited.
- `extraction`: passages of 8 to 32 tokens from the prompt, with three other tokens between two of them.

Texts that speculation must not slow down:

- `greedy`, `sampled`: what the model writes after random tokens, without repetitions.
- `misleading`: random draws from four tokens. The last tokens have always occurred before, but what followed them then
  tells little.

`speed_up` is tokens per second with speculation divided by those without, in the same round; `cpu_speed_up` is the same
for tokens per second of processor time of the worker, which other load on the machine changes less.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NamedTuple

from cpu_clock import CpuClock
from harness import Figures, Plan, Stack, note, run, show, start_stack
from job_timings import Timeline, median_of, summarize
from llamaq.common.errors import ModelError
from llamaq.common.protocol.job_options import JobOptions
from llamaq.producer import AsyncClient
from systems import check_target, range_of
from workload import follow, greedy, sampled

OFF, ON = "off", "ngram"
TIMES = {1: 8, 8: 3}
"""How often a number of jobs runs in each round, if more than once."""
EDIT_EVERY = 24
PASSAGE, N_BETWEEN = (8, 32), 3
N_MISLEADING = 4
REPEATING = ("edit", "extraction")
WARM_UP = "constrained"
"""A job with a grammar: a worker starts the process that compiles grammars for the first of them. Otherwise the process
would start half a minute later, beside a measured job."""
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


class Work(NamedTuple):
    """A job, and its output."""

    prompt: list[int]
    options: JobOptions
    expected: range | None = None
    """The output, if the model counts. None: another one."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Makes jobs that write `n_out` tokens after prompts of `n_in` tokens. Output tokens are below `n_vocab // 2`."""

    n_vocab: int
    n_in: int
    n_out: int
    random: Random

    def draw(self, kind: str) -> Work:
        """Return a job that writes a text of this kind."""
        work: Work = getattr(self, f"_{kind}")()
        return work

    def _edit(self) -> Work:
        output = self._output()
        edited = [token if place % EDIT_EVERY else self._other() for place, token in enumerate(output, start=1)]
        return self._repeating(edited, output)

    def _extraction(self) -> Work:
        output, passages, start = self._output(), list[range](), 0
        while start < self.n_out:
            n_tokens = self.random.randint(*PASSAGE)
            passages.append(output[start : start + n_tokens])
            start += n_tokens + N_BETWEEN
        self.random.shuffle(passages)
        return self._repeating([token for passage in passages for token in passage], output)

    def _greedy(self) -> Work:
        return Work(self._others(self.n_in), greedy(self.n_out))

    def _sampled(self) -> Work:
        return Work(self._others(self.n_in), sampled(self.n_out))

    def _misleading(self) -> Work:
        prompt = self._others(self.n_in)
        bias = dict.fromkeys(prompt[:N_MISLEADING], 100.0)
        return Work(prompt, {**sampled(self.n_out), "temperature": 1.0, "logit_bias": bias})

    def _constrained(self) -> Work:
        return Work(self._others(self.n_in), {**greedy(1), "choice": ["a", "b"]})

    def _repeating(self, source: list[int], output: range) -> Work:
        """Return a job with this output. The prompt is the source, other tokens before it, and the token that the
        output follows.
        """
        source = source[: self.n_in - 1]
        prompt = [*self._others(self.n_in - 1 - len(source)), *source, output[0] - 1]
        return Work(prompt, greedy(self.n_out), output)

    def _output(self) -> range:
        """Return an output of the model."""
        first = self.random.randrange(1, self.n_vocab // 2 - self.n_out)
        return range(first, first + self.n_out)

    def _other(self) -> int:
        """Return a token that no output has."""
        return self.random.randrange(self.n_vocab // 2, self.n_vocab * 3 // 4)

    def _others(self, n_tokens: int) -> list[int]:
        return [self._other() for _ in range(n_tokens)]


async def follow_each(jobs: Sequence[Work], client: AsyncClient) -> tuple[list[Timeline], Figures]:
    """Run these jobs at once, and return their timelines and the counts of their drafts."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(follow(client, one.prompt, **one.options)) for one in jobs]
    timelines = [task.result() for task in running]
    stats = [(await client.job(one.job_id or "").result()).stats for one in timelines]
    counts = {name: sum(getattr(one, name) for one in stats) for name in ("drafted_tokens", "accepted_tokens")}
    return timelines, counts


def time_worker(stack: Stack, queue: str, jobs: Sequence[Work]) -> tuple[Figures, list[list[int]]]:
    """Run these jobs at once, and return the figures and the tokens of each job.

    Raises:
        ModelError: An output is not what a model writes that counts.
    """
    clock = CpuClock(stack, queue)
    before = clock.read()
    timelines, counts = stack.run(partial(follow_each, jobs), queue)
    for job, timeline in zip(jobs, timelines, strict=True):
        if job.expected is not None and timeline.tokens != list(job.expected):
            raise ModelError("the model does not count; choose one whose name ends in -counting with --model")
    figures = summarize(timelines)
    cpu = clock.us_per_token(before, figures["tokens"])
    return {**figures, **counts, "cpu_us_per_token": cpu}, [one.tokens for one in timelines]


def time_both(stack: Stack, jobs: Sequence[Work], turn: int) -> Figures:
    """Run the jobs on both workers, one after the other. The order alternates with `turn`."""
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
    texts = Texts(n_vocab, sizes.n_in, sizes.n_out, Random(seed))

    def draw(kind: str, number: int) -> list[Work]:
        return [texts.draw(kind) for _ in range(number)]

    for kind in (*sizes.kinds, WARM_UP) if warms_up else ():
        time_both(stack, draw(kind, max(sizes.numbers)), turn)
    for kind in sizes.kinds:
        for number in sizes.numbers:
            for time in range(TIMES.get(number, 1) if warms_up else 1):
                yield kind, number, time_both(stack, draw(kind, number), turn + time)


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
    run(measure, default_model="tiny-counting")
