"""The bare loop: calls `llama_decode` (through ctypes) and numpy's argmax in a loop, for n sequences at once.

The loop has no queue, no Redis, no text, no stop conditions and no scheduling, so its time is a lower bound. The
overhead of a worker is the time that the worker needs in addition to this loop. Run as a script, this module measures
the tokens per second of 1, 4, 8, ... sequences.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import llama_cpp
import numpy as np
import numpy.typing as npt

from bare_context import load
from harness import Figures, Plan, note, run, show
from job_timings import median_of, spread
from llamaq.worker.settings import WorkerSettings
from workload import Prompts


@dataclass(frozen=True, slots=True)
class BareRun:
    """Tokens and timings of one run of the loop."""

    tokens: list[list[int]]
    """Generated tokens of each sequence."""
    wall_s: float
    prefill_s: float
    tick_s: list[float]
    cpu_s: float

    def summary(self) -> dict[str, Any]:
        n_tokens = sum(map(len, self.tokens))
        return {
            "tokens_per_s": round(n_tokens / self.wall_s, 1),
            "ttft_ms": round(self.prefill_s * 1000, 2),
            "itl_ms": spread([seconds * 1000 for seconds in self.tick_s]),
            "cpu_us_per_token": round(self.cpu_s * 1e6 / n_tokens, 1),
        }


class BareLoop:
    """A model and a context with the options of a worker."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._model, self._context = load(str(settings.model), settings.n_gpu_layers, context_options(settings))
        self._capacity = settings.batch_budget
        self._batch = llama_cpp.llama_batch_init(self._capacity, 0, 1)
        self._token = _view(self._batch.token, self._capacity)
        self._position = _view(self._batch.pos, self._capacity)
        self._wants_logits = _view(self._batch.logits, self._capacity)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(vocab)
        self.end_tokens = [token for token in range(self.n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, token)]

    def run(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> BareRun:
        """Generate `n_tokens` tokens after each prompt, greedily. End tokens are ignored. Prompts are not chunked."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        cpu_s, start_s = time.process_time(), time.perf_counter()
        newest = np.concatenate([self._prefill(group, first) for first, group in self._groups(prompts)])
        generated = [newest]
        prefilled_s = time.perf_counter()
        self._prepare_decode([len(prompt) for prompt in prompts])
        ended_s = [prefilled_s]
        for _ in range(n_tokens - 1):
            self._token[: len(prompts)] = newest
            newest = self._decode(len(prompts))
            self._position[: len(prompts)] += 1
            generated.append(newest)
            ended_s.append(time.perf_counter())
        return BareRun(
            tokens=np.stack(generated, axis=1).tolist(),
            wall_s=ended_s[-1] - start_s,
            prefill_s=prefilled_s - start_s,
            tick_s=np.diff(ended_s).tolist(),
            cpu_s=time.process_time() - cpu_s,
        )

    def _groups(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Sequence[Sequence[int]]]]:
        """Yield groups of prompts that fit into one batch, each with the index of its first prompt."""
        first, n_group = 0, 0
        for index, prompt in enumerate(prompts):
            if n_group + len(prompt) > self._capacity:
                yield first, prompts[first:index]
                first, n_group = index, 0
            n_group += len(prompt)
        yield first, prompts[first:]

    def _prefill(self, prompts: Sequence[Sequence[int]], first: int) -> npt.NDArray[np.int32]:
        at = 0
        for index, prompt in enumerate(prompts):
            end = at + len(prompt)
            self._token[at:end] = prompt
            self._position[at:end] = np.arange(len(prompt))
            self._wants_logits[at:end] = 0
            self._wants_logits[end - 1] = 1
            self._assign(range(at, end), first + index)
            at = end
        return self._decode(at, len(prompts))

    def _prepare_decode(self, lengths: Sequence[int]) -> None:
        """Fill the batch with one token for each sequence. Later decode steps change only tokens and positions."""
        self._position[: len(lengths)] = lengths
        self._wants_logits[: len(lengths)] = 1
        for index in range(len(lengths)):
            self._assign((index,), index)

    def _assign(self, rows: Sequence[int], seq_id: int) -> None:
        for row in rows:
            self._batch.n_seq_id[row] = 1
            self._batch.seq_id[row][0] = seq_id

    def _decode(self, n_tokens: int, n_rows: int | None = None) -> npt.NDArray[np.int32]:
        """Decode the first `n_tokens` tokens of the batch and return the best token of each row of logits."""
        self._batch.n_tokens = n_tokens
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        shape = (n_rows or n_tokens, self.n_vocab)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=shape)
        logits[:, self.end_tokens] = -np.inf
        best: npt.NDArray[np.int32] = logits.argmax(axis=1).astype(np.int32)
        return best

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def _view(pointer: Any, length: int) -> npt.NDArray[Any]:
    return np.ctypeslib.as_array(pointer, shape=(length,))


def context_options(settings: WorkerSettings) -> dict[str, int]:
    """Return the fields of `llama_context_params` that a worker with these settings sets."""
    return {
        "n_ctx": settings.n_ctx,
        "n_batch": settings.batch_budget,
        "n_ubatch": settings.ubatch_tokens,
        "n_seq_max": settings.n_parallel,
        "n_outputs_max": settings.n_parallel,
        "n_threads": settings.n_threads_alone,
        "n_threads_batch": settings.n_threads_alone,
        "kv_unified": settings.kv_unified,
    }


def measure(plan: Plan) -> Figures:
    """Return the figures for each number of sequences, with prompts of 64 tokens and outputs of 128 tokens."""
    numbers, n_out = ((1, 4), 16) if plan.quick else ((1, 4, 8, 16, 32), 128)
    figures: dict[str, Any] = {}
    with BareLoop(plan.settings(n_parallel=max(numbers))) as bare:
        prompts = Prompts(plan.seed, bare.n_vocab)
        bare.run(prompts.several(max(numbers), 8), 4)
        for number in numbers:
            rounds = [bare.run(prompts.several(number, 64), n_out).summary() for _ in range(plan.rounds)]
            figures[str(number)] = median_of(rounds)
            note(f"{number} sequences: {figures[str(number)]['tokens_per_s']} tokens/s")
    rows = [(n, one["tokens_per_s"], one["ttft_ms"], one["itl_ms"]["p50"]) for n, one in figures.items()]
    show("bare loop", ("sequences", "tokens/s", "TTFT ms", "tick p50 ms"), rows)
    return figures


if __name__ == "__main__":
    run(measure)
