from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.llama_samplers import random_logits

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.core.job_parts import N_LARGEST
from llamaq.worker.generation.sampling.candidates import Logits
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.generation.sampling.reasoning_budget import ReasoningBudget

TOP_K: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
GREEDY: dict[str, Any] = {"temperature": 0.0}
PENALTIES: dict[str, Any] = {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.5}
DRY: dict[str, Any] = {"dry_multiplier": 0.8, "dry_allowed_length": 1}
SUPPORTED: list[dict[str, Any]] = [
    TOP_K,
    TOP_K | {"top_k": 1},
    TOP_K | {"top_k": 7, "min_keep": 20, "temperature": 1.7},
    TOP_K | {"typical_p": 0.9},
    TOP_K | {"xtc_probability": 0.9, "xtc_threshold": 0.05},
    TOP_K | {"dynatemp_range": 0.5},
    TOP_K | {"samplers": ["top_k", "penalties", "temperature"]} | PENALTIES,
    TOP_K | PENALTIES,
    TOP_K | PENALTIES | DRY | {"penalty_last_n": 8},
    GREEDY,
    GREEDY | PENALTIES,
    GREEDY | DRY,
]
UNSUPPORTED: list[dict[str, Any]] = [
    TOP_K | {"top_k": 0},
    TOP_K | {"samplers": ["temperature", "top_k"]},
    TOP_K | {"repeat_penalty": 0.9},
    GREEDY | {"presence_penalty": -0.1},
    GREEDY | PENALTIES | {"penalty_last_n": -1},
    TOP_K | {"mirostat": 2},
    TOP_K | {"adaptive_target": 0.5, "samplers": ["top_k", "adaptive_p"]},
]


def new_sampler(params: dict[str, Any], **arguments: Any) -> LogitSampler:
    return LogitSampler(SamplingDefaults(**params), **{"seed": 1} | arguments)


def largest(logits: Logits, n: int, seed: int = 0) -> tuple[Any, Logits]:
    """Return the tokens with the `n` largest logits in random order, and their logits."""
    tokens = np.random.default_rng(seed).permutation(np.argsort(-logits)[:n]).astype(np.int32)
    return tokens, logits[tokens]


@given(
    seed=st.integers(0, 10**6),
    params=st.sampled_from(SUPPORTED),
    n_vocab=st.sampled_from([1, 60, 1000, 5003]),
    spread=st.sampled_from([0.3, 2.5, 8]),
    n_masked=st.integers(0, 3),
    n_bias=st.integers(0, 2),
)
def test_the_largest_logits_give_the_same_draw_as_all_logits(
    seed: int, params: dict[str, Any], n_vocab: int, spread: float, n_masked: int, n_bias: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(n_vocab, seed, spread)
    likely = np.argsort(-logits)[:90]  # so that penalties, masks and biases change the draws
    history = rng.choice(likely, 60).tolist()
    masked = set(rng.choice(likely, n_masked).tolist()) if n_vocab > n_masked else ()
    bias = dict.fromkeys(rng.choice(likely, n_bias).tolist(), -2.0)
    all_logits, few_logits = (new_sampler(params, seed=seed, logit_bias=bias, masked_tokens=masked) for _ in range(2))
    assert few_logits.n_largest is not None
    tokens, few = largest(logits, few_logits.n_largest, seed)
    before = few.copy()
    for n in range(20, 60, 3):
        best = None if all_logits.checks_logits else int(logits.argmax())
        expected = all_logits.sample(logits.copy(), history[:n], 10, best)
        assert few_logits.sample_largest(tokens, few, history[:n], 10) == expected
    assert (few == before).all()


@pytest.mark.parametrize("params", UNSUPPORTED, ids=repr)
def test_draws_that_need_all_logits_are_recognized(params: dict[str, Any]) -> None:
    assert new_sampler(params).n_largest is None


def test_bias_upwards_log_probabilities_and_a_reasoning_budget_need_all_logits() -> None:
    assert new_sampler(TOP_K, logit_bias={3: 0.5}).n_largest is None
    assert new_sampler(TOP_K, n_logprobs=0).n_largest is None
    budget = ReasoningBudget(5, b"<think>", b"</think>", [9], lambda token: bytes([token]), b"")
    assert new_sampler(TOP_K, reasoning=budget).n_largest is None


def test_each_token_that_may_be_lowered_adds_one_logit() -> None:
    assert new_sampler(GREEDY).n_largest == 1
    assert new_sampler(GREEDY | PENALTIES, masked_tokens=[1, 2, 2]).n_largest == 1 + 64 + 2
    sampler = new_sampler(TOP_K | PENALTIES | DRY, masked_tokens=[1, 2], logit_bias={3: -1.0, 4: -9.0})
    assert sampler.n_largest == 40 + 64 + 64 + 2 + 2
    assert sampler.n_largest < N_LARGEST


@pytest.mark.parametrize("params", [TOP_K, GREEDY, TOP_K | {"typical_p": 0.9}], ids=repr)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_job_fails_if_one_of_the_largest_logits_is_no_number(params: dict[str, Any], value: float) -> None:
    logits = random_logits(100, 1, 1.0)
    logits[3] = value
    with pytest.raises(JobRejected) as caught:
        new_sampler(params).sample_largest(np.arange(100, dtype=np.int32), logits, [1, 2], 1)
    assert caught.value.code is ErrorCode.DECODE_FAILED
