"""The systems of a comparison: llamaq workers and llama-server. Each system generates from the same prompts in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

from harness import Figures, Stack, note, start_stack
from job_timings import Answer, median_of, summarize
from llama_server import LlamaServer, start_llama_server
from llama_server_process import PEER_VARIABLE
from llamaq.producer import AsyncClient
from llamaq.worker.settings import WorkerSettings
from workload import follow_all, greedy

LLAMA_SERVER = "llama-server"
"""Name of llama-server among the systems. A worker has the name of its queue."""
CELL_BLOCK = 256
"""llama.cpp rounds the size of a context up to a multiple of this number of cells."""

Round = dict[str, Figures]
"""Maps the name of each system to its figures of one round."""


class System(Protocol):
    """A system that generates tokens after prompts."""

    def generate(self, prompts: Sequence[list[int]], n_out: int, *, cache_prompt: bool = True) -> list[Answer]:
        """Send all prompts at once and return the answers when all of them are complete.

        Decoding is greedy and continues past end tokens, so each answer has `n_out` tokens.
        """

    def clear_cache(self) -> None:
        """Drop the cells of earlier prompts, if the system has a command for this."""


@dataclass(frozen=True, slots=True)
class WorkerSystem:
    """A worker, which receives its jobs through a queue."""

    stack: Stack
    queue: str

    def generate(self, prompts: Sequence[list[int]], n_out: int, *, cache_prompt: bool = True) -> list[Answer]:
        return self.stack.run(partial(_generate, prompts, n_out, cache_prompt), self.queue)

    def clear_cache(self) -> None:
        """Do nothing. A worker is measured with a full cache."""


async def _generate(prompts: Sequence[list[int]], n_out: int, cache_prompt: bool, client: AsyncClient) -> list[Answer]:
    timelines = await follow_all(prompts, {**greedy(n_out), "cache_prompt": cache_prompt}, client)
    # The stats are fetched after all jobs have ended, so that the requests do not disturb the timings.
    results = [await client.job(one.job_id or "").result() for one in timelines]
    stats = [result.stats for result in results]
    return [
        Answer(timeline, one.prompt_tokens, one.prefix_cache_tokens)
        for timeline, one in zip(timelines, stats, strict=True)
    ]


@dataclass(slots=True)
class Systems:
    """All systems of a comparison, started and ready."""

    stack: Stack
    workers: Mapping[str, WorkerSystem]
    """Maps the name of each queue to its worker."""
    llama_server: LlamaServer | None
    _n_turns: int = 0

    @property
    def n_vocab(self) -> int:
        return self.stack.worker.card.n_vocab

    @property
    def all(self) -> dict[str, System]:
        """All systems by name."""
        return {**self.workers, **({LLAMA_SERVER: self.llama_server} if self.llama_server else {})}

    def measure_each(self, measure: Callable[[str, System], Figures]) -> Round:
        """Measure one system after the other. With each call, the next system is the first."""
        names = list(self.all)
        first = self._n_turns % len(names)
        self._n_turns += 1
        figures = {name: measure(name, self.all[name]) for name in names[first:] + names[:first]}
        return with_ratios({name: figures[name] for name in names})

    def generate_together(self, prompts: Sequence[list[int]], n_out: int) -> Round:
        """Send the same prompts to each system, all prompts at once."""
        return self.measure_each(lambda _, system: figures_of(system.generate(prompts, n_out)))

    def generate_one_by_one(self, prompts: Sequence[list[int]], n_out: int) -> Round:
        """Send the same prompts to each system, one prompt after the other."""

        def measure(_: str, system: System) -> Figures:
            answers = [system.generate([one], n_out)[0] for one in prompts]
            return figures_of(answers, busy_s(answers))

        return self.measure_each(measure)

    def describe_llama_server(self) -> Figures:
        """Return the version and the settings of llama-server as the figure `peer`. None without llama-server."""
        return {"peer": self.llama_server.describe() if self.llama_server else None}


@contextmanager
def start_systems(workers: Mapping[str, WorkerSettings]) -> Iterator[Systems]:
    """Start the workers, given by queue, and, if installed, llama-server with the settings of the first worker."""
    settings = [one.model_copy(update={"queue": queue}) for queue, one in workers.items()]
    with ExitStack() as exits:
        stack = exits.enter_context(start_stack(settings))
        llama_server = exits.enter_context(start_llama_server(settings[0]))
        if llama_server is None:
            note(f"llama-server is not compared: {PEER_VARIABLE} is not set (`make bench-peers` sets it).")
        yield Systems(stack, {queue: WorkerSystem(stack, queue) for queue in workers}, llama_server)


def round_up_to_cell_block(n_cells: float) -> int:
    """Return the smallest size of a context with at least `n_cells` cells."""
    return math.ceil(n_cells / CELL_BLOCK) * CELL_BLOCK


def busy_s(answers: Sequence[Answer]) -> float:
    """Return the sum of the latencies: the wall time of answers that were generated one after the other."""
    return sum(one.timeline.latency_ms for one in answers) / 1000


def figures_of(answers: Sequence[Answer], wall_s: float | None = None) -> Figures:
    """Return the timings of the answers and the number of prompt tokens that were computed.

    Args:
        answers: Answers of one system.
        wall_s: Wall time; by default the time from the first submit to the last end.
    """
    n_prompt = sum(one.prompt_tokens for one in answers)
    n_computed = sum(one.computed_tokens for one in answers)
    figures = summarize([one.timeline for one in answers])
    if wall_s is not None:
        figures |= {"wall_s": round(wall_s, 3), "tokens_per_s": round(figures["tokens"] / wall_s, 1)}
    counts = {"prompt_tokens": n_prompt, "computed_tokens": n_computed, "reused": round(1 - n_computed / n_prompt, 4)}
    return figures | counts


def with_ratios(one_round: Round) -> Round:
    """Add `vs_peer` to each worker: its wall time divided by llama-server's. A smaller ratio is better."""
    if (llama_server := one_round.get(LLAMA_SERVER)) is not None:
        for name, figures in one_round.items():
            if name != LLAMA_SERVER:
                figures["vs_peer"] = round(figures["wall_s"] / llama_server["wall_s"], 4)
    return one_round


def merge_rounds(rounds: Sequence[Round]) -> Round:
    """Return the medians over the rounds by system, with the range of the wall times and of the ratios."""
    merged = {}
    for name in rounds[0]:
        figures = [one[name] for one in rounds]
        ranges = {key: range_of(figures, key) for key in ("wall_s", "vs_peer") if key in figures[0]}
        merged[name] = median_of(figures) | {"range": ranges}
    return merged


def range_of(rounds: Sequence[Figures], key: str) -> list[float]:
    """Return the smallest and the largest value of a figure."""
    values = [figures[key] for figures in rounds]
    return [min(values), max(values)]


def distinct_tokens(prompts: Sequence[list[int]]) -> int:
    """Return the number of nodes in a prefix tree of the prompts.

    This is the number of tokens to compute when no common prefix is computed twice.
    """
    ordered = sorted(prompts)
    return sum(map(len, ordered)) - sum(common_tokens(*pair) for pair in pairwise(ordered))


def common_tokens(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (token, its) in pairs if token != its), min(len(one), len(other)))


def check_target(value: float, *, at_most: float | None = None, at_least: float | None = None) -> Figures:
    """Return a figure beside its target, and whether the target is met."""
    is_met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    target = at_most if at_least is None else at_least
    return {"value": value, "target": target, "is_met": is_met}


def format_range(figures: Figures, key: str, digits: int = 2) -> str:
    """Return a median with its range for a table, or a hyphen if the figure is missing."""
    if key not in figures:
        return "-"
    low, high = figures["range"][key]
    return f"{figures[key]:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
