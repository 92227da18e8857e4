"""The engine computes the same probabilities of prompts as a bare llama.cpp, in ticks of any shape, for any memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, Output, PromptScored
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import SUCCESS, Context, Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.generation.sampling.prompt_scorer import PromptScorer
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.testing import make_job

N_SLOTS, N_SCORED = 6, 40
OPTIONS = ContextOptions(
    n_ctx=2048,
    n_batch=128,
    n_ubatch=64,
    n_seq_max=16,
    n_threads=1,
    n_threads_batch=1,
    n_logits=N_SLOTS + N_SCORED,
    flash_attn="off",  # with flash attention, the logits differ more with the shape of the batch
    cache_type_k="f32",  # with f16, they differ by 1e-3 on some processors
    cache_type_v="f32",
)
TOLERANCE = 5e-4


@pytest.fixture
def engine(any_model: Path) -> Iterator[Engine]:
    engine = Engine(Model(any_model, ModelOptions(n_gpu_layers=0)), OPTIONS)
    yield engine
    engine.close()


def make_scheduler(engine: Engine) -> Scheduler:
    pool = SlotPool(N_SLOTS, engine.context.n_ctx, engine.sequences.n_sequences)
    memory = KvMemory(pool, engine.sequences, RadixPrefixCache(can_cut=engine.sequences.can_cut))
    guarded = GuardedStrategy(DecodeMaximal(), TickLimits(budget=128, chunk_size=64, scored_tokens=N_SCORED))
    return Scheduler(memory, guarded, end_tokens=frozenset())


def run_to_end(scheduler: Scheduler, engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while scheduler.has_work:
        scheduler.admit()
        scheduler.move(0.001)
        batch = scheduler.plan()
        outputs += scheduler.apply(batch, engine.run(batch) if batch else []).outputs
        scheduler.check_integrity()
    return outputs


def bare_logprobs(model: Path, prompts: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float64]]:
    """Return the logarithms of all probabilities after each token of each prompt, computed one prompt at a time."""
    opened = Model(model, ModelOptions(n_gpu_layers=0))
    context = Context(opened, replace(OPTIONS, n_logits=128))
    found = []
    for prompt in prompts:
        context.batch.clear()
        context.batch.add_text(prompt, 0)
        assert context.decode() == SUCCESS
        logits = np.array(context.logits(len(prompt)), np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        found.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
        assert context.remove(0, 0)
    context.close()
    opened.close()
    return found


def check(found: PromptLogprobs, expected: npt.NDArray[np.float64]) -> None:
    entries = [entry for entry in found[1:] if entry is not None]
    assert len(entries) == len(expected) - 1
    for entry, row in zip(entries, expected[:-1], strict=True):
        assert entry.logprob == pytest.approx(row[entry.token], abs=TOLERANCE)
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[: -found.n_top - 1 : -1], abs=TOLERANCE)


def random_prompt(n_tokens: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 500, n_tokens).tolist()
    return tokens


def test_the_values_are_those_of_a_bare_llama_cpp_in_ticks_of_any_shape(any_model: Path, engine: Engine) -> None:
    """Some jobs decode or read a plain prompt meanwhile. One prompt comes twice, and one continues another prompt."""
    first = random_prompt(90, 1)
    prompts = [first, random_prompt(2, 2), random_prompt(41, 3), first, [*first[:60], *random_prompt(20, 4)], [7]]
    scheduler = make_scheduler(engine)
    plain = [make_job(random_prompt(30, seed), max_tokens=20) for seed in (11, 12)]
    scored = [make_job(prompt, prompt_logprobs=at, max_tokens=at) for at, prompt in enumerate(prompts)]
    for job in (plain[0], *scored, plain[1]):
        scheduler.submit(job)
    outputs = run_to_end(scheduler, engine)
    found = {one.job: one.prompt_logprobs for one in outputs if isinstance(one, PromptScored)}
    assert [one.error for one in outputs if isinstance(one, JobEnded)] == [None] * 8
    assert set(found) == set(scored)
    expected = bare_logprobs(any_model, prompts)
    for job, values in zip(scored, expected, strict=True):
        check(found[job], values)
    twice = [entry.logprob for at in (0, 3) for entry in found[scored[at]][1:] if entry is not None]
    assert twice[:89] == pytest.approx(twice[89:], abs=TOLERANCE)


def logits_of_a_prompt(**changed: float) -> npt.NDArray[np.float32]:
    rows = np.random.default_rng(0).normal(size=(5, 700)).astype(np.float32)
    rows[2, 30] = changed.get("value", 0.0)
    return rows


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_fail_the_job(value: float) -> None:
    with pytest.raises(JobRejected, match="not numbers"):
        PromptScorer(2).score(logits_of_a_prompt(value=value), [1, 2, 3, 4, 5])


@pytest.mark.parametrize("n_top", [0, 1, 2, 20])
def test_a_scorer_finds_the_same_alternatives_in_large_and_small_vocabularies(n_top: int) -> None:
    for n_vocab in (25, 700, 300_000):  # with the largest one, each row is a block
        rows = np.random.default_rng(n_vocab).normal(scale=4, size=(4, n_vocab)).astype(np.float32)
        rows[1, 3:] = -np.inf  # masked tokens
        rows[2] = 1.0  # equal logits
        tokens = [3, 5, 7, int(rows[3].argmax())]
        prompt = PromptLogprobs((0, *tokens), n_top, PromptScorer(n_top).score(rows, tokens))
        entries = [entry for entry in prompt[1:] if entry is not None]
        values = rows.astype(np.float64)
        exact = values - np.log(np.exp(values - values.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        exact -= values.max(axis=1, keepdims=True)
        for entry, row, token in zip(entries, np.maximum(exact, -9999), tokens, strict=True):
            assert entry.logprob == pytest.approx(row[token], abs=1e-4)
            assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:n_top], abs=1e-4)
            assert all(row[other] == pytest.approx(value, abs=1e-4) for other, value in entry.top)
            assert len(dict(entry.top)) == n_top
            assert entry.rank == 1 + (row > row[token]).sum()
        assert entries[-1].rank == 1


def test_jobs_have_probabilities_in_a_context_of_few_rows(demo_model: Path) -> None:
    """The context has a row for each token that the scheduler plans, and no more."""
    engine = Engine(Model(demo_model, ModelOptions(n_gpu_layers=0)), replace(OPTIONS, n_seq_max=N_SLOTS + 1))
    scheduler = make_scheduler(engine)
    jobs: list[Job] = [make_job(random_prompt(100, seed), prompt_logprobs=1, max_tokens=9) for seed in range(9)]
    for job in jobs:
        scheduler.submit(job)
    outputs = run_to_end(scheduler, engine)
    engine.close()
    assert len([one for one in outputs if isinstance(one, PromptScored)]) == len(jobs)
