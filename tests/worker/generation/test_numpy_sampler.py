from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.candidate_filters import (
    SORT_LIMIT,
    TokenIds,
    dynamic_temperature,
    exclude_top_choices,
    mask_below_sigma,
    top_k,
    top_p_min_p,
    typical_p,
    unmasked_candidates,
)
from llamaq.worker.generation.numpy_sampler import LogitSampler

Logits = npt.NDArray[np.float32]
TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data of llama.cpp."""
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def llama_chain(logits: Logits, samplers: Sequence[Any], history: Sequence[int] = ()) -> dict[int, float]:
    """Apply samplers of llama.cpp. Return the logits of the tokens that they keep, by token id."""
    candidates = np.zeros(len(logits), TOKEN_DATA)
    candidates["id"] = np.arange(len(logits))
    candidates["logit"] = logits
    array = llama_cpp.llama_token_data_array(
        candidates.ctypes.data_as(llama_cpp.llama_token_data_p), len(candidates), -1, False
    )
    for sampler in samplers:
        for token in history:
            llama_cpp.llama_sampler_accept(sampler, token)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        llama_cpp.llama_sampler_free(sampler)
    # A sampler may move the start of the array, as XTC does.
    moved = ctypes.cast(array.data, ctypes.c_void_p).value or 0
    start = (moved - candidates.ctypes.data) // TOKEN_DATA.itemsize
    remaining = candidates[start : start + array.size]
    return {int(each["id"]): float(each["logit"]) for each in remaining if each["logit"] > -np.inf}


def llama_bias(n_vocab: int, bias: Mapping[int, float]) -> Any:
    items = (llama_cpp.llama_logit_bias * len(bias))(*[llama_cpp.llama_logit_bias(*item) for item in bias.items()])
    return llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(bias), items)


def distribution(sampler: LogitSampler, logits: Logits, history: Sequence[int]) -> tuple[TokenIds, Logits]:
    """Return the tokens that may be drawn without a grammar, and their probabilities. Changes `logits`."""
    sampler._adjust(logits, history)
    candidates = sampler._filter(sampler._candidates(logits), 0)
    weights = sampler._weights(candidates)
    return candidates.tokens, weights / weights.sum()


def softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    probabilities: npt.NDArray[np.float64] = weights / weights.sum()
    return probabilities


def away_from(values: npt.NDArray[Any], border: float) -> bool:
    """Return whether no value is so close to the border that a rounding error could move it to the other side."""
    return bool(np.abs(values - border).min() > 1e-4)


def random_logits(n: int, seed: int, spread: float = 2.5) -> Logits:
    return (np.random.default_rng(seed).normal(size=n) * spread).astype(np.float32)


distinct_logits = st.lists(st.integers(-600, 600), min_size=1, max_size=60, unique=True).map(
    lambda values: np.array(values, np.float32) / np.float32(61)
)
fractions = st.floats(0.01, 0.99)


@given(logits=distinct_logits, k=st.integers(1, 70))
def test_top_k_keeps_what_llama_cpp_keeps(logits: Logits, k: int) -> None:
    assert set(top_k(logits, k).tokens.tolist()) == set(llama_chain(logits, [llama_cpp.llama_sampler_init_top_k(k)]))


@pytest.mark.parametrize("k", [1, 40, 256, 5000])
def test_top_k_of_a_large_vocabulary_keeps_what_llama_cpp_keeps(k: int) -> None:
    logits = random_logits(151_936, seed=k)
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_top_k(k)])
    assert sorted(logits[top_k(logits, k).tokens]) == pytest.approx(sorted(remaining.values()))


@pytest.mark.parametrize("n", [10, 1000, 100_000])
def test_top_k_keeps_the_smaller_ids_among_equal_logits(n: int) -> None:
    assert top_k(np.zeros(n, np.float32), 7).tokens.tolist() == list(range(7))


@given(logits=distinct_logits, p=fractions)
def test_top_p_keeps_what_llama_cpp_keeps(logits: Logits, p: float) -> None:
    assume(away_from(np.cumsum(np.sort(softmax(logits))[::-1]), p))
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_top_p(p, 1)])
    assert top_p_min_p(unmasked_candidates(logits), p, 0).tokens.tolist() == sorted(remaining)


@given(logits=distinct_logits, min_p=fractions)
def test_min_p_keeps_what_llama_cpp_keeps(logits: Logits, min_p: float) -> None:
    assume(away_from(logits, float(logits.max() + np.log(min_p))))
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_min_p(min_p, 1)])
    assert top_p_min_p(unmasked_candidates(logits), 1, min_p).tokens.tolist() == sorted(remaining)


@given(logits=distinct_logits, p=fractions, min_p=fractions)
def test_top_p_and_min_p_together_keep_what_llama_cpp_keeps(logits: Logits, p: float, min_p: float) -> None:
    assume(away_from(np.cumsum(np.sort(softmax(logits))[::-1]), p))
    assume(away_from(logits, float(logits.max() + np.log(min_p))))
    samplers = [llama_cpp.llama_sampler_init_top_p(p, 1), llama_cpp.llama_sampler_init_min_p(min_p, 1)]
    assert top_p_min_p(unmasked_candidates(logits), p, min_p).tokens.tolist() == sorted(llama_chain(logits, samplers))


@given(logits=distinct_logits, p=fractions)
def test_typical_p_keeps_what_llama_cpp_keeps(logits: Logits, p: float) -> None:
    probabilities = softmax(logits)
    distance = np.abs(-np.log(probabilities) - (probabilities * -np.log(probabilities)).sum())
    assume(len(logits) == 1 or np.diff(np.sort(distance)).min() > 1e-4)
    assume(away_from(np.cumsum(probabilities[np.argsort(distance)]), p))
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_typical(p, 1)])
    assert typical_p(unmasked_candidates(logits), p).tokens.tolist() == sorted(remaining)


@given(logits=distinct_logits, n=st.floats(0.1, 3))
def test_top_n_sigma_keeps_what_llama_cpp_keeps(logits: Logits, n: float) -> None:
    assume(away_from(logits, float(logits.max() - n * logits.std(dtype=np.float64))))
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_top_n_sigma(n)])
    mask_below_sigma(logits, n)
    assert unmasked_candidates(logits).tokens.tolist() == sorted(remaining)


def test_top_n_sigma_does_not_count_masked_logits() -> None:
    logits = np.array([-np.inf, 5, 4, -20, -np.inf], np.float32)
    mask_below_sigma(logits, 1)
    assert logits.tolist() == [-np.inf, 5, 4, -np.inf, -np.inf]
    alone = np.array([-np.inf, 5], np.float32)
    mask_below_sigma(alone, 1)
    assert alone.tolist() == [-np.inf, 5]


@given(logits=distinct_logits, threshold=st.floats(0.01, 0.6))
def test_xtc_keeps_what_llama_cpp_keeps(logits: Logits, threshold: float) -> None:
    assume(away_from(softmax(logits), threshold))
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_xtc(1.0, threshold, 1, 7)])
    assert exclude_top_choices(unmasked_candidates(logits), threshold).tokens.tolist() == sorted(remaining)


def test_xtc_is_applied_with_its_probability() -> None:
    logits = np.array([3.0, 3.1, -1.0], np.float32)
    params = SamplingDefaults(**OFF | {"temperature": 0.01}, xtc_probability=0.25, xtc_threshold=0.2)
    sampler = LogitSampler(params, seed=4)
    drawn = [sampler.sample(logits.copy(), [9] * (1 + position), 1) for position in range(2000)]
    assert set(drawn) == {0, 1}
    assert 0.2 < drawn.count(0) / len(drawn) < 0.3, "token 1, the top choice, is excluded in a quarter of the draws"
    again = LogitSampler(params, seed=4)
    assert [again.sample(logits.copy(), [9] * (1 + position), 1) for position in range(50)] == drawn[:50]


@given(
    logits=distinct_logits,
    temperature=st.floats(0.2, 2),
    spread=st.floats(0.01, 3),
    exponent=st.floats(0.2, 4),
)
def test_the_dynamic_temperature_is_that_of_llama_cpp(
    logits: Logits, temperature: float, spread: float, exponent: float
) -> None:
    assume(len(logits) > 1)
    expected = llama_chain(logits, [llama_cpp.llama_sampler_init_temp_ext(temperature, spread, exponent)])
    found = dynamic_temperature(unmasked_candidates(logits), temperature, spread, exponent)
    assume(found > 0.01)
    token = int(np.abs(logits).argmax())
    assert float(logits[token]) / found == pytest.approx(expected[token], rel=1e-3, abs=1e-3)


@given(
    logits=distinct_logits,
    history=st.lists(st.integers(0, 59), max_size=30),
    last_n=st.integers(0, 40),
    repeat=st.floats(0.5, 2),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
)
def test_penalties_are_those_of_llama_cpp(
    logits: Logits, history: list[int], last_n: int, repeat: float, frequency: float, presence: float
) -> None:
    history = [token % len(logits) for token in history]
    params = SamplingDefaults(
        **OFF,
        penalty_last_n=last_n,
        repeat_penalty=repeat,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    chain = llama_cpp.llama_sampler_init_penalties(len(logits), last_n, repeat, frequency, presence)
    remaining = llama_chain(logits, [chain], history)
    tokens, probabilities = distribution(LogitSampler(params, seed=1), logits, history)
    assert tokens.tolist() == sorted(remaining)
    assert probabilities == pytest.approx(
        softmax(np.array([remaining[token] for token in sorted(remaining)])), abs=1e-5
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 0},
        {"top_k": 0, "min_p": 0.0},
        {"typical_p": 0.7},
        {"top_k": 0, "typical_p": 0.5, "top_p": 0.9},
        {"top_k": 4000, "top_p": 0.99, "min_p": 0.001, "temperature": 1.7, "repeat_penalty": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_the_whole_chain_gives_the_distribution_of_llama_cpp(params: dict[str, Any], spread: float) -> None:
    chosen = SamplingDefaults(**params)
    logits, history, bias = random_logits(20_000, 5, spread), [3, 9, 3, 7000] * 20, {7: 4.0, 11: -30.0, 7000: 2.5}
    assert len(logits) > SORT_LIMIT
    chain = [
        llama_bias(20_000, bias),
        llama_cpp.llama_sampler_init_penalties(20_000, 64, chosen.repeat_penalty, 0.0, 0.0),
        llama_cpp.llama_sampler_init_top_k(chosen.top_k),
        llama_cpp.llama_sampler_init_typical(chosen.typical_p, 1),
        llama_cpp.llama_sampler_init_top_p(chosen.top_p, 1),
        llama_cpp.llama_sampler_init_min_p(chosen.min_p, 1),
        llama_cpp.llama_sampler_init_temp(chosen.temperature),
    ]
    remaining = llama_chain(logits, chain, history)
    tokens, probabilities = distribution(LogitSampler(chosen, seed=1, logit_bias=bias), logits, history)
    # llama.cpp sums in float32. So the two samplers may differ in one of several thousand tokens.
    assert len(set(tokens.tolist()) ^ set(remaining)) <= len(remaining) // 1000
    both = sorted(set(tokens.tolist()) & set(remaining))
    expected = softmax(np.array([remaining[token] for token in both]))
    assert probabilities[np.isin(tokens, both)] == pytest.approx(expected, rel=2e-3)


def test_temperature_0_draws_the_most_probable_token_with_all_filters() -> None:
    logits = random_logits(5000, seed=1)
    for params in ({}, {"typical_p": 0.1}, {"top_k": 3}, {"top_p": 0.01}):
        sampler = LogitSampler(SamplingDefaults(temperature=0, **params), seed=1)
        assert sampler.sample(logits, [0], 1) == logits.argmax()


def test_bias_comes_before_penalties_and_the_mask_last() -> None:
    logits = np.array([-1.0, 2.0, 0.5], np.float32)
    params = SamplingDefaults(**OFF, penalty_last_n=-1, repeat_penalty=2.0)
    sampler = LogitSampler(params, seed=1, logit_bias={0: 5.0, 2: 50.0}, masked_tokens={2})
    tokens, probabilities = distribution(sampler, logits, [0])
    assert tokens.tolist() == [0, 1]
    assert probabilities == pytest.approx([0.5, 0.5]), "(-1 + 5) / 2 equals 2"


def test_a_draw_depends_on_seed_and_position_but_not_on_previous_draws() -> None:
    logits = random_logits(1000, seed=3)
    hot = SamplingDefaults(**{**OFF, "temperature": 2.0})
    first, second = LogitSampler(hot, seed=42), LogitSampler(hot, seed=42)
    history = [1, 2]
    drawn = []
    for _ in range(20):
        drawn.append(first.sample(logits, history, 2))
        history.append(drawn[-1])
    assert second.sample(logits, history[:12], 2) == drawn[10]
    assert len(set(drawn)) > 10
    assert LogitSampler(hot, seed=43).sample(logits, [1, 2], 2) != drawn[0]


def test_draws_follow_the_distribution() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    sampler = LogitSampler(SamplingDefaults(**OFF), seed=7)
    _, probabilities = distribution(sampler, logits, [])
    drawn = [sampler.sample(logits, [0] * n, 0) for n in range(20_000)]
    assert np.bincount(drawn, minlength=4) / len(drawn) == pytest.approx(probabilities, abs=0.015)


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.array([9.0, 1.0, 8.0, 0.0], np.float32)
    for temperature in (0, 1):
        params = SamplingDefaults(temperature=temperature, top_k=0, top_p=1, min_p=0)
        sampler = LogitSampler(params, seed=1, masked_tokens={0, 2})
        assert {sampler.sample(logits, [0] * n, 0) for n in range(50)} <= {1, 3}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_job_is_rejected_if_no_token_is_left(temperature: float) -> None:
    sampler = LogitSampler(SamplingDefaults(temperature=temperature), seed=1, masked_tokens=range(100))
    with pytest.raises(JobRejected) as refused:
        sampler.sample(random_logits(100, seed=1), [0], 1)
    assert refused.value.code == ErrorCode.GRAMMAR_EXHAUSTED


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_job_is_rejected_if_a_logit_is_not_finite(temperature: float, bad: float) -> None:
    logits = random_logits(100, seed=1)
    logits[50] = bad
    with pytest.raises(JobRejected) as refused:
        LogitSampler(SamplingDefaults(temperature=temperature), seed=1).sample(logits, [0], 1)
    assert refused.value.code == ErrorCode.DECODE_FAILED


def test_the_job_is_rejected_if_a_bias_is_for_a_token_outside_the_vocabulary() -> None:
    with pytest.raises(JobRejected) as refused:
        LogitSampler(SamplingDefaults(), seed=1, logit_bias={100: 1.0}).sample(random_logits(100, seed=1), [0], 1)
    assert refused.value.code == ErrorCode.INVALID_TOKEN


@given(
    logits=distinct_logits,
    temperature=st.floats(0, 100),
    top_k_=st.integers(0, 70),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    typical=st.floats(0, 1, exclude_min=True),
    bias=st.dictionaries(st.integers(0, 0), st.floats(-1e9, 1e9)),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_setting_within_bounds_draws_a_token(
    logits: Logits,
    temperature: float,
    top_k_: int,
    top_p: float,
    min_p: float,
    typical: float,
    bias: dict[int, float],
    seed: int,
) -> None:
    params = SamplingDefaults(temperature=temperature, top_k=top_k_, top_p=top_p, min_p=min_p, typical_p=typical)
    assert 0 <= LogitSampler(params, seed=seed, logit_bias=bias).sample(logits, [0, 0], 1) < len(logits)
