"""Random prompts, the options of benchmark jobs, and functions that submit jobs and record when their tokens arrive."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Unpack

from job_timings import Timeline
from llamaq.common.protocol.job_options import JobOptions
from llamaq.producer import AsyncClient, Tokenizer

Prompt = str | list[int]
"""Text or token ids."""


def greedy(max_tokens: int) -> JobOptions:
    """Return options for greedy decoding that does not end before `max_tokens`."""
    return {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}


def sampled(max_tokens: int) -> JobOptions:
    """Return common options for sampling (temperature, top-k, top-p, min-p) that does not end before `max_tokens`."""
    chain: JobOptions = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    return {**chain, "ignore_eos": True, "max_tokens": max_tokens, "seed": 1}


class Prompts:
    """Source of random prompts. All prompts differ, so that no prefix can be shared. Equal seeds give equal prompts."""

    def __init__(self, seed: int, n_vocab: int) -> None:
        self._random = random.Random(seed)
        self._n_vocab = n_vocab

    def tokens(self, n_tokens: int) -> list[int]:
        return [self._random.randrange(self._n_vocab) for _ in range(n_tokens)]

    def several(self, count: int, n_tokens: int) -> list[list[int]]:
        return [self.tokens(n_tokens) for _ in range(count)]

    def text(self, n_tokens: int, tokenizer: Tokenizer) -> str:
        """Return a text of about `n_tokens` tokens, made of random tokens that are whole characters."""
        pieces: list[str] = []
        while len(pieces) < n_tokens:
            piece = tokenizer.decode(self.tokens(1))
            if piece and "\ufffd" not in piece:
                pieces.append(piece)
        return "".join(pieces)


async def follow(
    client: AsyncClient,
    prompt: Prompt,
    on_tokens: Callable[[int], object] = lambda _: None,
    **options: Unpack[JobOptions],
) -> Timeline:
    """Submit a job and read its stream to the end. `on_tokens` is called with the number of tokens of each arrival."""
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
            on_tokens(len(chunk.tokens))
    timeline.ended_s = time.perf_counter()
    return timeline


async def follow_all(prompts: Sequence[Prompt], options: JobOptions, client: AsyncClient) -> list[Timeline]:
    """Submit all prompts at once and return when all jobs have ended."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(follow(client, prompt, **options)) for prompt in prompts]
    return [task.result() for task in running]
