"""Prompts, jobs as their subscribers see them, and figures made of that."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from harness import Stack
from llamaq.common.protocol.job_request import JobOptions
from llamaq.producer import AsyncClient, Tokenizer

Prompt = str | list[int]
"""Text, or token ids."""


def greedy(max_tokens: int) -> JobOptions:
    """Always the best token, and no early end."""
    return {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}


def sampled(max_tokens: int) -> JobOptions:
    """What most people set: temperature, top-k, top-p, min-p; and no early end."""
    chain: JobOptions = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    return {**chain, "ignore_eos": True, "max_tokens": max_tokens, "seed": 1}


class Prompts:
    """Random prompts, no two alike, so that no prefix can be shared; the same for the same seed."""

    def __init__(self, seed: int, n_vocab: int) -> None:
        self._random = random.Random(seed)
        self._n_vocab = n_vocab

    def tokens(self, n_tokens: int) -> list[int]:
        return [self._random.randrange(self._n_vocab) for _ in range(n_tokens)]

    def several(self, count: int, n_tokens: int) -> list[list[int]]:
        return [self.tokens(n_tokens) for _ in range(count)]

    def text(self, n_tokens: int, tokenizer: Tokenizer) -> str:
        """A text of about so many tokens, made of random ones that are whole characters."""
        pieces: list[str] = []
        while len(pieces) < n_tokens:
            piece = tokenizer.decode(self.tokens(1))
            if piece and "\ufffd" not in piece:
                pieces.append(piece)
        return "".join(pieces)


@dataclass(slots=True)
class Timeline:
    """What one subscriber saw: when its job was submitted, and when how many tokens came. Seconds of one clock."""

    submitted_s: float
    arrivals_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    job_id: str | None = None
    """To ask for its stats; None where it was no job of a worker."""

    @property
    def ttft_ms(self) -> float:
        """From submit to the first token."""
        return (self.arrivals_s[0] - self.submitted_s) * 1000

    @property
    def gaps_ms(self) -> list[float]:
        """Between arrivals; several tokens may arrive together."""
        return [float(gap) for gap in np.diff(self.arrivals_s) * 1000]

    @property
    def latency_ms(self) -> float:
        """From submit to the end."""
        return (self.ended_s - self.submitted_s) * 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """A job as its caller saw it, and how much of its prompt needed no computing."""

    timeline: Timeline
    prompt_tokens: int
    reused_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.prompt_tokens - self.reused_tokens


async def follow(
    client: AsyncClient,
    prompt: Prompt,
    seen: Callable[[int], object] = lambda _: None,
    **options: Unpack[JobOptions],
) -> Timeline:
    """Submit a job and follow it to its end; `seen` is told of each arrival's number of tokens."""
    timeline = Timeline(time.perf_counter())
    if isinstance(prompt, str):
        job = await client.submit(prompt, **options)
    else:
        job = await client.submit(tokens=prompt, **options)
    timeline.job_id = job.id
    async for chunk in job.stream():
        if chunk.tokens:
            timeline.arrivals_s.append(time.perf_counter())
            timeline.counts.append(len(chunk.tokens))
            timeline.tokens += chunk.tokens
            seen(len(chunk.tokens))
    timeline.ended_s = time.perf_counter()
    return timeline


async def follow_all(prompts: Sequence[Prompt], options: JobOptions, client: AsyncClient) -> list[Timeline]:
    """All at once; returns when all have ended."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(follow(client, prompt, **options)) for prompt in prompts]
    return [task.result() for task in running]


def summarize(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Figures of jobs that ran together: over all from the first submit to the last end."""
    n_tokens = sum(sum(one.counts) for one in timelines)
    wall_s = max(one.ended_s for one in timelines) - min(one.submitted_s for one in timelines)
    return {
        "jobs": len(timelines),
        "tokens": n_tokens,
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(n_tokens / wall_s, 1),
        "ttft_ms": spread([one.ttft_ms for one in timelines]),
        "itl_ms": spread([gap for one in timelines for gap in one.gaps_ms]),
        "tokens_per_arrival": round(n_tokens / sum(len(one.counts) for one in timelines), 2),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Percentiles and the largest; zeros where nothing was measured."""
    p50, p95, p99, largest = np.percentile(values or (0.0,), (50, 95, 99, 100)).round(2).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": largest}


def median_of(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over rounds that have the same ones."""
    merged: dict[str, Any] = {}
    for name, first in rounds[0].items():
        values = [figures[name] for figures in rounds]
        if isinstance(first, dict):
            merged[name] = median_of(values)
        else:
            merged[name] = round(statistics.median(values), 4)
    return merged


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Processor time of a worker, of Redis and of this process; unlike wall time it hardly depends on other load."""

    stack: Stack
    queue: str = "default"

    def read(self) -> dict[str, float]:
        """Seconds so far; nothing where there is no /proc."""
        redis_pid = self.stack.redis.pid
        if redis_pid is None or not Path("/proc/self/stat").exists():
            return {}
        worker_pid = self.stack.workers[self.queue].card.pid
        return {"worker": _cpu_s(worker_pid), "redis": _cpu_s(redis_pid), "client": time.process_time()}

    def us_per_token(self, before: dict[str, float], n_tokens: int) -> dict[str, float]:
        """Microseconds per token since an earlier `read`."""
        now = self.read()
        return {name: round((now[name] - before[name]) * 1e6 / n_tokens, 1) for name in now}


def _cpu_s(pid: int) -> float:
    # man 5 proc_pid_stat: the second field is the name in parentheses; utime and stime are the 14th and the 15th.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
