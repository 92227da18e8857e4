from __future__ import annotations

import numpy as np
import pytest
from tests.support.llama_samplers import random_logits

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.generation.sampling.logprobs import token_logprobs

LOGITS = np.array([1.0, 3.0, -2.0, 3.0, 0.5], np.float32)
EXPECTED = np.log(np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum())


def test_the_logarithms_are_those_of_the_softmax() -> None:
    found = token_logprobs(LOGITS, 2, 3)
    assert found.logprob == pytest.approx(EXPECTED[2], abs=1e-4)
    assert {token for token, _ in found.top} == {1, 3, 0}
    assert [value for _, value in found.top] == pytest.approx([EXPECTED[1], EXPECTED[3], EXPECTED[0]], abs=1e-4)


def test_the_alternatives_in_a_large_vocabulary_are_the_largest_logits_with_the_smaller_ids_first() -> None:
    logits = np.round(random_logits(20_011, 1))
    expected = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    for n_top in (1, 5, 300):
        assert [token for token, _ in token_logprobs(logits, 0, n_top).top] == expected[:n_top]


def test_no_alternatives_and_all_alternatives() -> None:
    assert token_logprobs(LOGITS, 0, 0).top == ()
    assert [token for token, _ in token_logprobs(LOGITS, 0, 5).top][2:] == [0, 4, 2]


def test_large_and_infinite_logits_have_finite_logarithms() -> None:
    found = token_logprobs(np.array([1e30, -np.inf, 0], np.float32), 1, 3)
    assert found.logprob == -9999.0
    assert found.top[0] == (0, 0.0)


def test_sampling_parameters_do_not_change_them() -> None:
    params = SamplingDefaults(temperature=0, repeat_penalty=5, penalty_last_n=-1)
    sampler = LogitSampler(params, seed=1, logit_bias={1: -50.0, 3: -50.0}, masked_tokens=[0], n_logprobs=2)
    assert sampler.sample(LOGITS.copy(), [1, 1, 2], 1) == 4
    assert sampler.logprobs == token_logprobs(LOGITS, 4, 2)


def test_sampled_jobs_get_those_of_the_model_too() -> None:
    sampler = LogitSampler(SamplingDefaults(), seed=1, masked_tokens=[1], n_logprobs=2)
    token = sampler.sample(LOGITS.copy(), [1], 1)
    assert sampler.logprobs == token_logprobs(LOGITS, token, 2)


def test_a_job_that_does_not_ask_gets_none() -> None:
    sampler = LogitSampler(SamplingDefaults(), seed=1)
    sampler.sample(LOGITS.copy(), [1], 1)
    assert sampler.logprobs is None


def test_those_of_the_draw_are_after_all_samplers() -> None:
    params = SamplingDefaults(temperature=0.5, top_k=2, min_p=0, top_p=1)
    logits = np.array([1.0, 3.0, -2.0, 2.5, 0.5], np.float32)
    sampler = LogitSampler(params, seed=1, masked_tokens=[2], n_logprobs=4, has_drawn_logprobs=True)
    token = sampler.sample(logits.copy(), [1], 1)
    assert sampler.logprobs is not None
    probability = 1 / (1 + np.exp(-1.0))  # of the better of two candidates: their logits differ by 0.5 / temperature
    assert [each for each, _ in sampler.logprobs.top] == [1, 3]
    assert np.exp([value for _, value in sampler.logprobs.top]) == pytest.approx(
        [probability, 1 - probability], abs=1e-4
    )
    assert sampler.logprobs.logprob == dict(sampler.logprobs.top)[token]


def test_a_greedy_draw_has_one_candidate() -> None:
    params = SamplingDefaults(temperature=0)
    sampler = LogitSampler(params, seed=1, n_logprobs=4, has_drawn_logprobs=True)
    assert sampler.sample(LOGITS.copy(), [1], 1) == 1
    assert sampler.logprobs == (0.0, ((1, 0.0),))
