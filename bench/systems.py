"""Sides of a comparison: workers through their client and llama-server over HTTP, asked the same prompts in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

from harness import Figures, Stack, note, stack
from job_timings import Answer, median_of, summarize
from llama_server import PYTHON, LlamaServer, llama_server
from llamaq.producer import AsyncClient
from llamaq.worker.settings import WorkerSettings
from workload import follow_all, greedy

PEER = "llama-server"
"""The peer's name among the sides; workers have their queue's."""
CELL_BLOCK = 256
"""llama.cpp rounds a context up to a multiple of it."""

Round = dict[str, Figures]
"""Figures of one round, by side."""


class Side(Protocol):
    """What answers prompts."""

    def ask(self, prompts: Sequence[list[int]], n_out: int, *, cache_prompt: bool = True) -> list[Answer]:
        """Answers to all prompts, sent at once: greedy, past any end token. Returns when all have ended."""

    def forget(self) -> None:
        """Forget earlier prompts, where that can be asked for."""


@dataclass(frozen=True, slots=True)
class WorkerSide:
    """A worker, asked through its queue."""

    stack: Stack
    queue: str

    def ask(self, prompts: Sequence[list[int]], n_out: int, *, cache_prompt: bool = True) -> list[Answer]:
        return self.stack.run(partial(_ask, prompts, n_out, cache_prompt), self.queue)

    def forget(self) -> None:
        """A worker keeps what it has: it is asked with a full cache."""


async def _ask(prompts: Sequence[list[int]], n_out: int, cache_prompt: bool, client: AsyncClient) -> list[Answer]:
    timelines = await follow_all(prompts, {**greedy(n_out), "cache_prompt": cache_prompt}, client)
    results = [await client.job(one.job_id or "").result() for one in timelines]  # after all have ended
    stats = [result.stats for result in results]
    return [
        Answer(timeline, one.prompt_tokens, one.prefix_cache_tokens)
        for timeline, one in zip(timelines, stats, strict=True)
    ]


@dataclass(slots=True)
class Sides:
    """Everything that is compared, started and ready."""

    stack: Stack
    workers: Mapping[str, WorkerSide]
    peer: LlamaServer | None
    _n_turns: int = 0

    @property
    def n_vocab(self) -> int:
        return self.stack.worker.card.n_vocab

    @property
    def all(self) -> dict[str, Side]:
        """By name."""
        return {**self.workers, **({PEER: self.peer} if self.peer else {})}

    def in_turn(self, ask: Callable[[str, Side], Figures]) -> Round:
        """Figures of all sides, one after the other; each call begins with the next side."""
        names = list(self.all)
        first = self._n_turns % len(names)
        self._n_turns += 1
        figures = {name: ask(name, self.all[name]) for name in names[first:] + names[:first]}
        return with_ratios({name: figures[name] for name in names})

    def ask(self, prompts: Sequence[list[int]], n_out: int) -> Round:
        """The same prompts at once on each side."""
        return self.in_turn(lambda _, side: figures_of(side.ask(prompts, n_out)))

    def ask_each(self, prompts: Sequence[list[int]], n_out: int) -> Round:
        """The same prompts one after the other on each side."""

        def ask(_: str, side: Side) -> Figures:
            answers = [side.ask([one], n_out)[0] for one in prompts]
            return figures_of(answers, busy_s(answers))

        return self.in_turn(ask)

    def describe_peer(self) -> Figures:
        """The peer's version and settings, as figures of their own."""
        return {"peer": self.peer.describe() if self.peer else None}


@contextmanager
def sides(workers: Mapping[str, WorkerSettings]) -> Iterator[Sides]:
    """These workers, by queue, and llama-server with the settings of the first, where there is one."""
    settings = [one.model_copy(update={"queue": queue}) for queue, one in workers.items()]
    with ExitStack() as ends:
        over = ends.enter_context(stack(settings))
        peer = ends.enter_context(llama_server(settings[0]))
        if peer is None:
            note(f"Without llama-server: {PYTHON} names no python that has xllamacpp (see `make bench-peers`).")
        yield Sides(over, {queue: WorkerSide(over, queue) for queue in workers}, peer)


def whole_blocks(n_cells: float) -> int:
    """The least context that has so many cells."""
    return math.ceil(n_cells / CELL_BLOCK) * CELL_BLOCK


def busy_s(answers: Sequence[Answer]) -> float:
    """The sum of the times of answers that came one after the other."""
    return sum(one.timeline.latency_ms for one in answers) / 1000


def figures_of(answers: Sequence[Answer], wall_s: float | None = None) -> Figures:
    """What the callers saw, and how many tokens of their prompts were computed."""
    n_prompt = sum(one.prompt_tokens for one in answers)
    n_computed = sum(one.computed_tokens for one in answers)
    figures = summarize([one.timeline for one in answers])
    if wall_s is not None:
        figures |= {"wall_s": round(wall_s, 3), "tokens_per_s": round(figures["tokens"] / wall_s, 1)}
    counts = {"prompt_tokens": n_prompt, "computed_tokens": n_computed, "reused": round(1 - n_computed / n_prompt, 4)}
    return figures | counts


def with_ratios(one_round: Round) -> Round:
    """`vs_peer` for each worker: its wall time over llama-server's, less is better."""
    if (peer := one_round.get(PEER)) is not None:
        for name, figures in one_round.items():
            if name != PEER:
                figures["vs_peer"] = round(figures["wall_s"] / peer["wall_s"], 4)
    return one_round


def over_rounds(rounds: Sequence[Round]) -> Round:
    """Medians by side, and the smallest and largest of the times and ratios."""
    merged = {}
    for name in rounds[0]:
        figures = [one[name] for one in rounds]
        ranges = {key: range_of(figures, key) for key in ("wall_s", "vs_peer") if key in figures[0]}
        merged[name] = median_of(figures) | {"range": ranges}
    return merged


def range_of(rounds: Sequence[Figures], key: str) -> list[float]:
    """The smallest and the largest of a figure."""
    values = [figures[key] for figures in rounds]
    return [min(values), max(values)]


def distinct_tokens(prompts: Sequence[list[int]]) -> int:
    """How many tokens have to be computed when no common prefix is computed twice: the nodes of a tree of them."""
    ordered = sorted(prompts)
    return sum(map(len, ordered)) - sum(common_tokens(*pair) for pair in pairwise(ordered))


def common_tokens(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (token, its) in pairs if token != its), min(len(one), len(other)))


def verdict(value: float, *, at_most: float | None = None, at_least: float | None = None) -> Figures:
    """A figure beside what it should be."""
    is_met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    target = at_most if at_least is None else at_least
    return {"value": value, "target": target, "is_met": is_met}


def said(figures: Figures, key: str, digits: int = 2) -> str:
    """A median with its range, for a table; a hyphen where there is none."""
    if key not in figures:
        return "-"
    low, high = figures["range"][key]
    return f"{figures[key]:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
