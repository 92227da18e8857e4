"""Prompts as text against the same prompts as token ids, while others stream.

Four streams run throughout; meanwhile two callers send long prompts one after the other, for one token each, first as
text (the worker tokenizes), then as ids (the caller did). Shown: the callers' throughput and latency, and the streams'
tokens per second and ITL. `alone` are the streams without callers; `encode_ms` is what tokenizing one prompt takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from harness import Figures, Plan, Stack, note, run, show, stack
from llamaq.common.messages import JobOptions
from llamaq.producer import AsyncClient, Tokenizer
from workload import GREEDY, CpuClock, Prompts, Timeline, follow, median_of, spread, summarize

N_STREAMS, N_CALLERS = 4, 2
STREAM_IN, STREAM_OUT = 32, 128
N_PROMPTS, PROMPT_TOKENS = 16, 1000
QUICK_N_PROMPTS, QUICK_PROMPT_TOKENS = 4, 100
ALONE_S, QUICK_ALONE_S = 3.0, 0.5

Prompt = str | list[int]


class Streams:
    """Those who stream, one job after the other, until told to stop."""

    def __init__(self, client: AsyncClient, prompts: Prompts) -> None:
        self._client = client
        self._prompts = prompts
        self._enough = asyncio.Event()
        self._tasks: list[asyncio.Task[list[Timeline]]] = []
        self._started = asyncio.Event()

    async def start(self) -> None:
        """Return when tokens come."""
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(N_STREAMS)]
        await self._started.wait()

    async def _stream(self) -> list[Timeline]:
        options: JobOptions = {**GREEDY, "max_tokens": STREAM_OUT}
        seen = []
        while not self._enough.is_set():
            prompt = self._prompts.tokens(STREAM_IN)
            seen.append(await follow(self._client, prompt, lambda _: self._started.set(), **options))
        return seen

    async def stop(self, since_s: float, until_s: float) -> dict[str, Any]:
        """Let the jobs end; figures of what arrived between these two times."""
        self._enough.set()
        timelines = [one for task in self._tasks for one in await task]
        arrivals = [pair for one in timelines for pair in zip(one.arrivals_s, one.counts, strict=True)]
        n_tokens = sum(count for at_s, count in arrivals if since_s <= at_s <= until_s)
        gaps = [
            gap
            for one in timelines
            for at_s, gap in zip(one.arrivals_s[1:], one.gaps_ms, strict=True)
            if since_s <= at_s <= until_s
        ]
        return {"tokens_per_s": round(n_tokens / (until_s - since_s), 1), "itl_ms": spread(gaps)}


async def call(client: AsyncClient, prompts: Sequence[Prompt]) -> list[Timeline]:
    """Each prompt for one token, one after the other."""
    return [await follow(client, prompt, **{**GREEDY, "max_tokens": 1}) for prompt in prompts]


async def under_load(filler: Prompts, prompts: Sequence[Prompt], client: AsyncClient) -> dict[str, Any]:
    """Callers with these prompts beside the streams."""
    streams = Streams(client, filler)
    await streams.start()
    since_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        callers = [tasks.create_task(call(client, prompts[index::N_CALLERS])) for index in range(N_CALLERS)]
    until_s = time.perf_counter()
    timelines = [one for caller in callers for one in caller.result()]
    figures = {"prompts_per_s": round(len(prompts) / (until_s - since_s), 2)}
    return {**figures, "ttft_ms": summarize(timelines)["ttft_ms"], "others": await streams.stop(since_s, until_s)}


async def without_callers(filler: Prompts, seconds: float, client: AsyncClient) -> dict[str, Any]:
    """The streams alone."""
    streams = Streams(client, filler)
    await streams.start()
    since_s = time.perf_counter()
    await asyncio.sleep(seconds)
    return {"others": await streams.stop(since_s, time.perf_counter())}


def time_round(over: Stack, filler: Prompts, tokenizer: Tokenizer, plan: Plan) -> dict[str, Any]:
    """Alone, text, ids."""
    n_prompts, length = (QUICK_N_PROMPTS, QUICK_PROMPT_TOKENS) if plan.quick else (N_PROMPTS, PROMPT_TOKENS)
    texts = [filler.text(length, tokenizer) for _ in range(n_prompts)]
    start_s = time.perf_counter()
    encoded = [tokenizer.encode(text) for text in texts]
    encode_ms = (time.perf_counter() - start_s) * 1000 / n_prompts
    figures = {
        "alone": over.run(partial(without_callers, filler, QUICK_ALONE_S if plan.quick else ALONE_S)),
        "text": _time_callers(over, filler, texts),
        "ids": _time_callers(over, filler, encoded),
    }
    sizes = {"prompt_tokens": sum(map(len, encoded)) / n_prompts, "prompt_chars": sum(map(len, texts)) / n_prompts}
    note(f"prompts/s: text {figures['text']['prompts_per_s']}, ids {figures['ids']['prompts_per_s']}")
    return {**sizes, "encode_ms": round(encode_ms, 3), **figures}


def _time_callers(over: Stack, filler: Prompts, prompts: Sequence[Prompt]) -> dict[str, Any]:
    clock = CpuClock(over)
    before = clock.read()
    figures = over.run(partial(under_load, filler, prompts))
    return figures | {"cpu_us_per_prompt": clock.us_per_token(before, len(prompts))}


def measure(plan: Plan) -> Figures:
    """Medians over the rounds."""
    with stack([plan.settings(n_parallel=8)]) as over:
        tokenizer = over.run(lambda client: client.tokenizer())
        filler = Prompts(plan.seed, over.worker.card.n_vocab)
        over.run(partial(without_callers, filler, QUICK_ALONE_S))  # warm up
        figures = median_of([time_round(over, filler, tokenizer, plan) for _ in range(plan.rounds)])
    _show(figures)
    return {"slots": 8, "streams": N_STREAMS, "callers": N_CALLERS, **figures}


def _show(figures: dict[str, Any]) -> None:
    rows = []
    for side in ("alone", "text", "ids"):
        one, others = figures[side], figures[side]["others"]
        called = (one["prompts_per_s"], one["ttft_ms"]["p50"]) if side != "alone" else ("", "")
        rows.append((side, *called, others["tokens_per_s"], *others["itl_ms"].values()))
    show(
        f"prompts of {figures['prompt_tokens']:.0f} tokens, {figures['encode_ms']:.2f} ms to tokenize one",
        ("callers send", "prompts/s", "TTFT p50 ms", "others' tok/s", "ITL p50", "p95", "p99", "max ms"),
        rows,
    )


if __name__ == "__main__":
    run(measure)
