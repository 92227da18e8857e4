from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.llama_samplers import away_from, llama_chain, random_logits, softmax

from llamaq.worker.generation.sampling.candidate_filters import (
    dynamic_temperature,
    exclude_top_choices,
    top_k,
    top_n_sigma,
    top_p_min_p,
    typical_p,
)
from llamaq.worker.generation.sampling.candidates import Candidates, Logits

distinct_logits = st.lists(st.integers(-600, 600), min_size=1, max_size=60, unique=True).map(
    lambda values: np.array(values, np.float32) / np.float32(61)
)
fractions = st.floats(0.01, 0.99)
min_keeps = st.integers(0, 9)


def ids(candidates: Candidates) -> list[int]:
    """Return the ids of the candidates in ascending order."""
    return sorted(candidates.token_at(index) for index in range(len(candidates)))


@given(logits=distinct_logits, k=st.integers(1, 70))
def test_top_k_keeps_what_llama_cpp_keeps(logits: Logits, k: int) -> None:
    assert set(ids(top_k(Candidates(logits), k))) == set(llama_chain(logits, [llama_cpp.llama_sampler_init_top_k(k)]))


@pytest.mark.parametrize("k", [1, 40, 256, 5000])
def test_top_k_of_a_large_vocabulary_keeps_what_llama_cpp_keeps(k: int) -> None:
    logits = random_logits(151_936, seed=k)
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_top_k(k)])
    assert sorted(logits[ids(top_k(Candidates(logits), k))]) == pytest.approx(sorted(remaining.values()))


@pytest.mark.parametrize("n", [10, 1000, 100_000])
def test_top_k_keeps_the_smaller_ids_among_equal_logits(n: int) -> None:
    assert ids(top_k(Candidates(np.zeros(n, np.float32)), 7)) == list(range(7))


@given(logits=distinct_logits, p=fractions, min_keep=min_keeps)
def test_top_p_keeps_what_llama_cpp_keeps(logits: Logits, p: float, min_keep: int) -> None:
    assume(away_from(np.cumsum(np.sort(softmax(logits))[::-1]), p))
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_top_p(p, min_keep)])
    assert ids(top_p_min_p(Candidates(logits), p, 0, min_keep)) == sorted(remaining)


@given(logits=distinct_logits, min_p=fractions, min_keep=min_keeps)
def test_min_p_keeps_what_llama_cpp_keeps(logits: Logits, min_p: float, min_keep: int) -> None:
    assume(away_from(logits, float(logits.max() + np.log(min_p))))
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_min_p(min_p, min_keep)])
    assert ids(top_p_min_p(Candidates(logits), 1, min_p, min_keep)) == sorted(remaining)


@given(logits=distinct_logits, p=fractions, min_p=fractions, min_keep=min_keeps)
def test_top_p_and_min_p_together_keep_what_llama_cpp_keeps(
    logits: Logits, p: float, min_p: float, min_keep: int
) -> None:
    assume(away_from(np.cumsum(np.sort(softmax(logits))[::-1]), p))
    assume(away_from(logits, float(logits.max() + np.log(min_p))))
    samplers = [llama_cpp.llama_sampler_init_top_p(p, min_keep), llama_cpp.llama_sampler_init_min_p(min_p, min_keep)]
    assert ids(top_p_min_p(Candidates(logits), p, min_p, min_keep)) == sorted(llama_chain(logits, samplers))


@given(logits=distinct_logits, p=fractions, min_keep=min_keeps)
def test_typical_p_keeps_what_llama_cpp_keeps(logits: Logits, p: float, min_keep: int) -> None:
    probabilities = softmax(logits)
    distance = np.abs(-np.log(probabilities) - (probabilities * -np.log(probabilities)).sum())
    assume(len(logits) == 1 or np.diff(np.sort(distance)).min() > 1e-4)
    assume(away_from(np.cumsum(probabilities[np.argsort(distance)]), p))
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_typical(p, min_keep)])
    assert ids(typical_p(Candidates(logits), p, min_keep)) == sorted(remaining)


@given(logits=distinct_logits, n=st.floats(0.1, 3))
def test_top_n_sigma_keeps_what_llama_cpp_keeps(logits: Logits, n: float) -> None:
    assume(away_from(logits, float(logits.max() - n * logits.std(dtype=np.float64))))
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_top_n_sigma(n)])
    assert ids(top_n_sigma(Candidates(logits), n)) == sorted(remaining)


@given(logits=distinct_logits, threshold=st.floats(0.01, 0.6), min_keep=min_keeps)
def test_xtc_keeps_what_llama_cpp_keeps(logits: Logits, threshold: float, min_keep: int) -> None:
    assume(away_from(softmax(logits), threshold))
    remaining = llama_chain(logits, [llama_cpp.llama_sampler_init_xtc(1.0, threshold, min_keep, 7)])
    assert ids(exclude_top_choices(Candidates(logits), threshold, min_keep)) == sorted(remaining)


MIN_OTHERS = 1e-4
"""Probability of all tokens but the best, from which on rounding matters little."""


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
    weights = np.exp(logits.astype(np.float64) - logits.max())
    # llama.cpp computes the entropy in float32. If one token has almost all of the probability, rounding changes it.
    assume(weights.max() < (1 - MIN_OTHERS) * weights.sum())
    expected = llama_chain(logits, [llama_cpp.llama_sampler_init_temp_ext(temperature, spread, exponent)])
    found = dynamic_temperature(Candidates(logits), temperature, spread, exponent)
    assume(found > 0.01)
    token = int(np.abs(logits).argmax())
    assert float(logits[token]) / found == pytest.approx(expected[token], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("min_keep", [0, 3000])
def test_filters_of_a_large_vocabulary_keep_what_llama_cpp_keeps(min_keep: int) -> None:
    logits = random_logits(20_000, seed=3, spread=2)
    for p, min_p in ((0.5, 0.0), (1.0, 0.1), (0.4, 0.2)):
        samplers = [
            llama_cpp.llama_sampler_init_top_p(p, min_keep), llama_cpp.llama_sampler_init_min_p(min_p, min_keep)
        ]  # fmt: skip
        kept, expected = ids(top_p_min_p(Candidates(logits), p, min_p, min_keep)), llama_chain(logits, samplers)
        # llama.cpp sums in float32. So the two may differ in one of a thousand tokens.
        assert len(set(kept) ^ set(expected)) <= len(expected) // 1000


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 8.0])
@pytest.mark.parametrize("p", [0.01, 0.6, 0.95, 1 - 1e-9])
def test_top_p_of_a_large_vocabulary_keeps_the_fewest_candidates_with_the_mass(spread: float, p: float) -> None:
    logits = np.round(random_logits(20_000, seed=4, spread=spread), 2)  # with ties
    logits[::3] = -np.inf
    order = (-logits).argsort(kind="stable")
    reached = np.exp(logits[order] - logits.max()).cumsum(dtype=np.float64)
    expected = sorted(order[: reached.searchsorted(p * reached[-1] * (1 - 1e-13)) + 1].tolist())
    assert ids(top_p_min_p(Candidates(logits), p, 0, 0)) == expected


@pytest.mark.parametrize("spread", [0.3, 3.0, 8.0])
@pytest.mark.parametrize("p", [0.01, 0.6, 0.99])
def test_typical_p_of_a_large_vocabulary_keeps_the_fewest_candidates_with_the_mass(spread: float, p: float) -> None:
    logits = random_logits(20_000, seed=5, spread=spread)
    logits[:50] += 4 * np.float32(spread)
    probabilities = softmax(logits).astype(np.float64)
    surprise = -np.log(probabilities)
    order = np.abs(surprise - (probabilities * surprise).sum()).argsort()
    expected = order[: probabilities[order].cumsum().searchsorted(p, "right") + 1].tolist()
    # A rounding error can exchange two candidates that are equally far from the entropy.
    assert len(set(ids(typical_p(Candidates(logits), p, 0))) ^ set(expected)) <= 2 + len(expected) // 1000


def test_masked_logits_are_no_candidates() -> None:
    logits = np.array([-np.inf, 5, 4, -20, -np.inf], np.float32)
    assert ids(top_k(Candidates(logits), 4)) == ids(Candidates(logits).without_masked()) == [1, 2, 3]
    assert ids(top_n_sigma(Candidates(logits).without_masked(), 1)) == [1, 2]
    assert len(top_k(Candidates(np.full(3, -np.inf, np.float32)), 2)) == 0


def test_a_search_for_tokens_finds_the_candidates_among_them() -> None:
    candidates = Candidates(np.array([1, 2, 3], np.float32), np.array([9, 4, 7]))
    given, own = candidates.find(np.array([7, 5, 9]))
    assert dict(zip(np.arange(3)[given].tolist(), own.tolist(), strict=True)) == {0: 2, 2: 0}
