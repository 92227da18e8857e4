"""How many tokens a second does a worker score with `prompt_logprobs`, beside the same prompts without it?

The prompts are token ids, and no text is generated. `plain` computes the prompts alone, `scored` also returns the
probability of each token and of the most probable one. llama-cpp-python scores one prompt in its process, as
`Llama(logits_all=True)` does for `echo` with `logprobs=1`. It spends 0.2 s on each token of a large vocabulary, so its
prompt is short. The worker scores the same prompt. `largest_difference` is between its logarithms of probabilities and
those from the logits of llama-cpp-python, whose answer has the probability of each token one position too late.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import llama_cpp

from harness import Figures, Plan, Stack, note, run, show, start_stack
from job_timings import median_of
from llamaq.common.protocol.job_options import JobOptions
from llamaq.producer import AsyncClient
from workload import Prompts

N_PROMPTS, QUICK_N_PROMPTS = 32, 4
N_TOKENS, QUICK_N_TOKENS = 200, 30
N_PEER_TOKENS = 24
N_CTX = 8192
KINDS: dict[str, JobOptions] = {
    "plain": {"max_tokens": 0, "cache_prompt": False, "stream": False},
    "scored": {"max_tokens": 0, "cache_prompt": False, "stream": False, "prompt_logprobs": 1},
}


async def _score(prompts: list[list[int]], options: JobOptions, client: AsyncClient) -> float:
    """Return the tokens per second of some prompts, submitted at once."""
    started_s = time.perf_counter()
    await asyncio.gather(*(client.generate_tokens(prompt, **options) for prompt in prompts))
    return sum(map(len, prompts)) / (time.perf_counter() - started_s)


async def _text(prompts: Prompts, client: AsyncClient) -> str:
    return prompts.text(N_PEER_TOKENS, await client.tokenizer())


async def _logprobs(prompt: str, client: AsyncClient) -> list[float]:
    """Return the logarithms of all probabilities but the first one."""
    result = await client.generate(prompt, **KINDS["scored"])
    return [entry.logprob for entry in result.prompt_logprobs or () if entry is not None]


def _score_with_llama_cpp_python(plan: Plan, prompt: str) -> tuple[float, list[float]]:
    """Return the tokens per second of llama-cpp-python, and the logarithms of all probabilities but the first one."""
    threads = {"n_threads": plan.n_threads, "n_threads_batch": plan.n_threads}
    model = llama_cpp.Llama(str(plan.model), logits_all=True, n_ctx=512, verbose=False, **threads)
    started_s = time.perf_counter()
    answer: Any = model.create_completion(prompt, max_tokens=1, echo=True, logprobs=1, temperature=0)
    seconds = time.perf_counter() - started_s
    tokens = model.input_ids[: answer["usage"]["prompt_tokens"]]
    logprobs = llama_cpp.Llama.logits_to_logprobs(model.scores[: len(tokens) - 1])
    return len(tokens) / seconds, [float(row[token]) for row, token in zip(logprobs, tokens[1:], strict=True)]


def _round(plan: Plan, stack: Stack, prompts: Prompts) -> Figures:
    n_prompts, n_tokens = (QUICK_N_PROMPTS, QUICK_N_TOKENS) if plan.quick else (N_PROMPTS, N_TOKENS)
    rates: dict[str, float] = {}
    for kind, options in KINDS.items():
        rates[kind] = round(stack.run(partial(_score, prompts.several(n_prompts, n_tokens), options)), 1)
    text = stack.run(partial(_text, prompts))
    peer, expected = _score_with_llama_cpp_python(plan, text)
    found = stack.run(partial(_logprobs, text))
    difference = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    note(f"tokens/s: {rates['plain']} plain, {rates['scored']} scored, {peer:.1f} with llama-cpp-python")
    return {
        "tokens_per_s": {**rates, "llama_cpp_python": round(peer, 1)},
        "of_plain": round(rates["scored"] / rates["plain"], 3),
        "of_llama_cpp_python": round(rates["scored"] / peer, 1),
        "largest_difference": round(difference, 5),
    }


def measure(plan: Plan) -> Figures:
    """Return the medians over the rounds."""
    with start_stack([plan.settings(n_parallel=8, n_ctx=N_CTX)]) as stack:
        n_vocab = stack.worker.card.n_vocab
        prompts = Prompts(plan.seed, n_vocab)
        _round(plan, stack, prompts)  # warm-up
        figures: Figures = median_of([_round(plan, stack, prompts) for _ in range(plan.rounds)])
    rates = figures["tokens_per_s"]
    show("scoring prompts", ("system", "tokens/s"), [(name, f"{rate:,.1f}") for name, rate in rates.items()])
    return {"n_vocab": n_vocab, **figures}


if __name__ == "__main__":
    run(measure)
