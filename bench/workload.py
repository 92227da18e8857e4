"""Random prompts, the options of benchmark jobs, and functions that submit jobs and record when their tokens arrive."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Unpack

from job_timings import Timeline
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
