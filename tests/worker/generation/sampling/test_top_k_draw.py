from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.llama_samplers import random_logits

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling.candidates import Logits
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler

COMMON: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
FAST: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 3, "top_p": 1, "min_p": 0},
    {"top_k": 700, "min_keep": 9, "temperature": 1.7},
    {"top_p": 0.3, "temperature": 1},
    {"min_p": 1, "min_keep": 2},
    {"repeat_penalty": 1.3, "frequency_penalty": -0.2, "presence_penalty": 0.5},
    {"dry_multiplier": 0.8},
    {"samplers": "kt"},
    {"samplers": "kpm", "dynatemp_range": 0.2},
]


def new_sampler(params: dict[str, Any], **arguments: Any) -> LogitSampler:
    return LogitSampler(SamplingDefaults(**COMMON | params), **{"seed": 1} | arguments)


@given(
    seed=st.integers(0, 10**6),
    params=st.sampled_from(FAST),
    n_vocab=st.sampled_from([1, 7, 60, 1000, 5003]),
    spread=st.sampled_from([0.01, 0.3, 2.5, 8]),
    has_ties=st.booleans(),
    n_masked=st.integers(0, 3),
    has_bias=st.booleans(),
)
def test_the_fast_draw_is_that_of_the_general_chain(
    seed: int, params: dict[str, Any], n_vocab: int, spread: float, has_ties: bool, n_masked: int, has_bias: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(n_vocab, seed, spread)
    if has_ties:
        logits = np.round(logits)
    history = rng.integers(0, n_vocab, 60).tolist()
    masked = set(rng.integers(0, n_vocab, n_masked).tolist()) if n_vocab > n_masked else ()
    bias = {int(rng.integers(n_vocab)): 4.0} if has_bias else None
    fast, general = (new_sampler(params, seed=seed, logit_bias=bias, masked_tokens=masked) for _ in range(2))
    assert fast.checks_logits
    for n in range(20, 60, 3):
        drawn = fast.sample(logits.copy(), history[:n], 10)
        assert drawn == general._sample(logits.copy(), history[:n], 10)


def test_the_fast_draw_of_a_large_vocabulary_is_that_of_the_general_chain() -> None:
    params = {"temperature": 4, "min_p": 0, "top_p": 1}
    fast, general = new_sampler(params), new_sampler(params)
    for n_vocab in (32_000, 128_256, 151_936, 151_999):
        logits = random_logits(n_vocab, n_vocab)
        drawn = [fast.sample(logits, [0] * n, 0) for n in range(1, 20)]
        assert drawn == [general._sample(logits, [0] * n, 0) for n in range(1, 20)]
        assert len(set(drawn)) > 1


def test_the_tokens_of_a_job_do_not_depend_on_the_jobs_that_share_its_batch() -> None:
    n_steps, n_vocab = 12, 3000
    alone = [generate_step_by_step([index], n_steps, n_vocab)[0] for index in range(len(FAST))]
    assert generate_step_by_step(range(len(FAST)), n_steps, n_vocab) == alone
    assert generate_step_by_step(range(len(FAST))[::-1], n_steps, n_vocab) == alone[::-1]
    assert len({token for tokens in alone for token in tokens}) > len(FAST)


def generate_step_by_step(jobs: Sequence[int], n_steps: int, n_vocab: int) -> list[list[int]]:
    """Return the tokens of some of ten jobs. In each step, each job draws from its row of one matrix."""
    samplers = [new_sampler(FAST[job], seed=job) for job in jobs]
    histories = [[job] for job in jobs]
    for step in range(n_steps):
        rows = np.stack([random_logits(n_vocab, 100 * step + job) for job in jobs])
        for sampler, history, row in zip(samplers, histories, rows, strict=True):
            history.append(sampler.sample(row, history, 1))
    return [history[1:] for history in histories]


@pytest.mark.parametrize("place", [0, 700, 1022])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("masked", ["none", "one", "many"])
def test_the_fast_draw_finds_every_logit_that_is_not_a_finite_number(place: int, bad: float, masked: str) -> None:
    logits = random_logits(1023, 1)
    assert new_sampler({}).sample(logits.copy(), [0], 0) < 1023
    logits[place] = bad
    tokens = {"none": set(), "one": {place}, "many": {place, *range(1, 30)}}[masked]
    with pytest.raises(JobRejected, match="not numbers") as refused:
        new_sampler({}, masked_tokens=tokens).sample(logits, [0], 0)
    assert refused.value.code == ErrorCode.DECODE_FAILED


@pytest.mark.parametrize("logits", [np.zeros(9000, np.float32), np.full(9000, -1e38, np.float32)], ids=["0", "low"])
def test_the_smaller_ids_are_kept_among_many_equal_logits(logits: Logits) -> None:
    sampler = new_sampler({"top_k": 3})
    assert {sampler.sample(logits, [0] * n, 0) for n in range(40)} == {0, 1, 2}


def test_only_jobs_with_the_most_common_samplers_use_the_fast_draw() -> None:
    others: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_k": 0},
        {"xtc_probability": 0.5},
        {"top_n_sigma": 1},
        {"typical_p": 0.7},
        {"samplers": "tk"},
        {"samplers": "kmpt"},
        {"samplers": "kkt"},
        {"dynatemp_range": 0.2},
        {"mirostat": 1},
        {"mirostat": 2},
        {"adaptive_target": 0.1},
    ]
    assert all(new_sampler(params).checks_logits for params in FAST)
    assert not any(new_sampler(params).checks_logits for params in others)
    assert new_sampler({}, n_logprobs=0).checks_logits
    assert not new_sampler({}, n_logprobs=3, has_drawn_logprobs=True).checks_logits
