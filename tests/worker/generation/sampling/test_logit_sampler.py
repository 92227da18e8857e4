from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import llama_cpp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose  # not in the test: this import starts a process in numpy 1.26
from pydantic import ValidationError
from tests.support.llama_samplers import llama_bias, llama_chain, random_logits, softmax

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.sampler_names import DEFAULT_SAMPLERS, LETTERS, SamplerName
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling.candidate_filters import SORT_LIMIT
from llamaq.worker.generation.sampling.candidates import Logits
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
distinct_logits = st.lists(st.integers(-600, 600), min_size=1, max_size=60, unique=True).map(
    lambda values: np.array(values, np.float32) / np.float32(61)
)


def distribution(sampler: LogitSampler, logits: Logits, history: Sequence[int]) -> dict[int, float]:
    """Return the tokens that may be drawn after a history, and their probabilities. Changes `logits`."""
    candidates = sampler._filtered(sampler._penalized(logits, history, 0), history, 0)
    probabilities = candidates.probabilities().tolist()
    return {candidates.token_at(index): probabilities[index] for index in range(len(candidates))}


def normalized(logits: dict[int, float]) -> dict[int, float]:
    """Return the softmax of logits by token id."""
    return dict(zip(logits, softmax(np.array(list(logits.values()))).tolist(), strict=True))


def llama_samplers(params: SamplingDefaults, n_vocab: int) -> list[Any]:
    """Return the chain of llama.cpp for these parameters, without DRY and without the draw."""
    makers: dict[SamplerName, Callable[[], Any]] = {
        "penalties": lambda: llama_cpp.llama_sampler_init_penalties(
            n_vocab, params.penalty_last_n, params.repeat_penalty, params.frequency_penalty, params.presence_penalty
        ),
        "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(params.top_n_sigma),
        "top_k": lambda: llama_cpp.llama_sampler_init_top_k(params.top_k),
        "typ_p": lambda: llama_cpp.llama_sampler_init_typical(params.typical_p, params.min_keep),
        "top_p": lambda: llama_cpp.llama_sampler_init_top_p(params.top_p, params.min_keep),
        "min_p": lambda: llama_cpp.llama_sampler_init_min_p(params.min_p, params.min_keep),
        "xtc": lambda: llama_cpp.llama_sampler_init_xtc(
            params.xtc_probability, params.xtc_threshold, params.min_keep, 1
        ),
        "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(
            params.temperature, params.dynatemp_range, params.dynatemp_exponent
        ),
    }
    return [makers[name]() for name in params.samplers if name in makers]


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
    assert distribution(LogitSampler(params, seed=1), logits, history) == pytest.approx(normalized(remaining), abs=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 0},
        {"top_k": 0, "min_p": 0.0},
        {"typical_p": 0.7},
        {"top_k": 0, "typical_p": 0.5, "top_p": 0.9},
        {"top_k": 4000, "top_p": 0.99, "min_p": 0.001, "temperature": 1.7, "repeat_penalty": 1.3},
        {"top_n_sigma": 1.0, "dynatemp_range": 0.7},
        {"top_n_sigma": 1.0, "dynatemp_range": 0.7, "top_k": 4000, "top_p": 1.0, "min_p": 0.0},
        {"top_n_sigma": 1.0, "dynatemp_range": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_n_sigma": 1.0, "dynatemp_range": 0.7, "top_k": 0, "min_keep": 3000},
        {"samplers": ["temperature", "top_n_sigma", "temperature"], "top_n_sigma": 2.0, "dynatemp_range": 0.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_the_whole_chain_gives_the_distribution_of_llama_cpp(params: dict[str, Any], spread: float) -> None:
    chosen = SamplingDefaults(**params)
    logits, history, bias = random_logits(20_000, 5, spread), [3, 9, 3, 7000] * 20, {7: 4.0, 11: -30.0, 7000: 2.5}
    assert len(logits) > SORT_LIMIT
    chain = [llama_bias(20_000, bias), *llama_samplers(chosen, 20_000)]
    expected = normalized(llama_chain(logits, chain, history))
    found = distribution(LogitSampler(chosen, seed=1, logit_bias=bias), logits, history)
    # llama.cpp sums in float32. So the two samplers may differ in one of several thousand tokens.
    assert len(found.keys() ^ expected.keys()) <= len(expected) // 1000
    both = found.keys() & expected.keys()
    assert_allclose([found[token] for token in both], [expected[token] for token in both], rtol=3e-3)


def test_a_dynamic_temperature_of_0_leaves_the_most_probable_token() -> None:
    params = SamplingDefaults(
        temperature=0.3,
        dynatemp_range=0.3,
        dynatemp_exponent=100,
        repeat_penalty=2,
        samplers=["temperature", "penalties"],
    )
    logits = np.array([9, 6, 0, -3], np.float32)
    expected = normalized(llama_chain(logits, llama_samplers(params, 4), [0]))
    assert distribution(LogitSampler(params, seed=1), logits, [0]) == expected == {0: 1.0}


@given(
    seed=st.integers(0, 10**6),
    order=st.permutations(DEFAULT_SAMPLERS),
    n_samplers=st.integers(0, 10),
    min_keep=st.integers(0, 6),
)
def test_samplers_are_applied_in_the_order_of_the_job_as_by_llama_cpp(
    seed: int, order: list[SamplerName], n_samplers: int, min_keep: int
) -> None:
    # With `min_keep`, XTC of llama.cpp keeps the tokens that top-n-sigma has masked, and drops more others.
    assume(min_keep == 0 or "xtc" not in order[:n_samplers] or order.index("xtc") < order.index("top_n_sigma"))
    rng = np.random.default_rng(seed)
    params = SamplingDefaults(
        samplers=tuple(order[:n_samplers]),
        min_keep=min_keep,
        temperature=float(rng.uniform(0.3, 2)),
        dynatemp_range=float(rng.choice([0, 0.25])),
        top_k=int(rng.integers(1, 60)),
        top_p=float(rng.uniform(0.3, 1)),
        min_p=float(rng.uniform(0.01, 0.3)),
        typical_p=float(rng.uniform(0.3, 1)),
        top_n_sigma=float(rng.uniform(0.5, 3)),
        xtc_probability=1.0,
        xtc_threshold=float(rng.uniform(0.02, 0.5)),
        repeat_penalty=1.3,
        presence_penalty=0.4,
        penalty_last_n=20,
    )
    logits, history = random_logits(200, seed), rng.integers(0, 200, 60).tolist()
    samplers = llama_samplers(params, 200)
    expected = normalized(llama_chain(logits, samplers, history))
    nudged = [float(p) for p in np.linspace(0.999, 1.001, 5)]
    # The two may differ where a border is as close as a rounding error. Such cases are skipped: there, almost equal
    # logits have other candidates.
    assume(all(
        set(llama_chain((logits * p).astype(np.float32), llama_samplers(params, 200), history)) == set(expected)
        for p in nudged
    ))  # fmt: skip
    assert distribution(LogitSampler(params, seed=1), logits, history) == pytest.approx(expected, rel=3e-3, abs=1e-6)


def test_samplers_may_be_named_as_llama_cpp_names_them() -> None:
    assert SamplingDefaults(samplers="edskypmxta").samplers == SamplingDefaults().samplers == DEFAULT_SAMPLERS
    assert SamplingDefaults(samplers="top-k;typ;temp").samplers == ("top_k", "typ_p", "temperature")
    assert SamplingDefaults(samplers=["TopP", "min_p", "nucleus"]).samplers == ("top_p", "min_p", "top_p")
    assert set(LETTERS.values()) == set(get_args(SamplerName)) == {*DEFAULT_SAMPLERS, "infill"}
    assert SamplingDefaults(samplers=[]).samplers == ()
    for wrong in ("kz", ["no"], ["top_k", "?"]):
        with pytest.raises(ValueError, match="there is no sampler"):
            SamplingDefaults(samplers=wrong)


def test_a_temperature_that_is_not_among_the_samplers_has_no_effect() -> None:
    params = SamplingDefaults(temperature=0, samplers=["top_k"], top_k=2)
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    assert distribution(LogitSampler(params, seed=1), logits, [0]) == pytest.approx(normalized({1: 3.0, 2: 2.0}))


@given(
    history=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    first=st.integers(1, 60),
    last_n=st.integers(-1, 30),
)
def test_penalties_count_a_growing_history_as_a_whole_one(history: list[int], first: int, last_n: int) -> None:
    params = SamplingDefaults(**OFF, penalty_last_n=last_n, frequency_penalty=0.1, presence_penalty=0.2)
    growing, logits = LogitSampler(params, seed=1), np.zeros(6, np.float32)
    for n in range(min(first, len(history)), len(history) + 1):
        found = distribution(growing, logits.copy(), history[:n])
        assert found == pytest.approx(distribution(LogitSampler(params, seed=1), logits.copy(), history[:n]))


def test_xtc_is_applied_with_its_probability() -> None:
    logits = np.array([3.0, 3.1, -1.0], np.float32)
    params = SamplingDefaults(**OFF | {"temperature": 0.01}, xtc_probability=0.25, xtc_threshold=0.2)
    sampler = LogitSampler(params, seed=4)
    drawn = [sampler.sample(logits.copy(), [9] * (1 + position), 1) for position in range(2000)]
    assert set(drawn) == {0, 1}
    assert 0.2 < drawn.count(0) / len(drawn) < 0.3, "token 1, the top choice, is excluded in a quarter of the draws"
    again = LogitSampler(params, seed=4)
    assert [again.sample(logits.copy(), [9] * (1 + position), 1) for position in range(50)] == drawn[:50]


def test_temperature_0_draws_the_most_probable_token_with_all_filters() -> None:
    logits = random_logits(5000, seed=1)
    for params in ({}, {"typical_p": 0.1}, {"top_k": 3}, {"top_p": 0.01}):
        sampler = LogitSampler(SamplingDefaults(temperature=0, **params), seed=1)
        assert sampler.sample(logits, [0], 1) == logits.argmax()


@pytest.mark.parametrize(
    ("samplers", "expected"),
    [
        (["penalties", "top_k", "temperature"], 1),
        (["top_k", "penalties", "temperature"], 0),
        (["top_p", "penalties", "temperature"], 0),
        (["temperature", "penalties"], 0),
        (["temperature", "dry"], 0),
    ],
)
def test_temperature_0_applies_the_samplers_before_the_last_penalty(samplers: list[Any], expected: int) -> None:
    """llama.cpp draws the same tokens: 5 / 2 is less than 4, unless 4 was removed before the penalty."""
    logits = np.array([5.0, 4.0, 3.0, 0.0], np.float32)
    params = SamplingDefaults(
        samplers=samplers, temperature=0, top_k=1, top_p=0.3, repeat_penalty=2.0, dry_multiplier=9, dry_allowed_length=1
    )
    assert LogitSampler(params, seed=1).sample(logits, [0], 1) == expected


def test_bias_comes_before_penalties_and_the_mask_last() -> None:
    logits = np.array([-1.0, 2.0, 0.5], np.float32)
    params = SamplingDefaults(**OFF, penalty_last_n=-1, repeat_penalty=2.0)
    sampler = LogitSampler(params, seed=1, logit_bias={0: 5.0, 2: 50.0}, masked_tokens={2})
    found = distribution(sampler, logits, [0])
    assert found == pytest.approx({0: 0.5, 1: 0.5}), "(-1 + 5) / 2 equals 2"


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


@pytest.mark.parametrize(
    "params",
    [{}, {"mirostat": 1, "mirostat_tau": 9}, {"mirostat": 2, "mirostat_tau": 9}, {"adaptive_target": 0.1}],
    ids=str,
)
def test_a_rounding_error_hardly_changes_the_draws(params: dict[str, Any]) -> None:
    logits = np.zeros(300, np.float32)
    logits[100] = 1
    noise = np.random.default_rng(1).normal(size=300).astype(np.float32) * np.float32(1e-5)
    sampler = LogitSampler(SamplingDefaults(top_k=0, top_p=1, **params), seed=2)
    drawn, again = (
        [sampler.sample(each.copy(), [0] * n, 0) for n in range(1, 300)] for each in (logits + noise, logits - noise)
    )
    assert sum(one != other for one, other in zip(drawn, again, strict=True)) < 5


def test_draws_follow_the_distribution() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    sampler = LogitSampler(SamplingDefaults(**OFF), seed=7)
    expected = distribution(sampler, logits, [])
    drawn = [sampler.sample(logits, [0] * n, 0) for n in range(8000)]
    assert {token: drawn.count(token) / len(drawn) for token in range(4)} == pytest.approx(expected, abs=0.025)


def test_only_a_sampler_that_changes_no_logits_takes_the_best_token() -> None:
    def takes_best(arguments: dict[str, Any], **params: Any) -> bool:
        sampler = LogitSampler(SamplingDefaults(**{"temperature": 0} | params), seed=1, **arguments)
        logits = np.array([9, 8, 0, 9], np.float32)
        return sampler.sample(logits, [], 0, drawn=2) == 2  # the best token as claimed, although others are better

    assert takes_best({})
    assert takes_best({}, top_p=0.1, mirostat=1, samplers="kt")
    assert takes_best({"masked_tokens": [1, 3]})
    for arguments in ({"logit_bias": {1: 1.0}}, {"masked_tokens": [1, 2]}, {"n_logprobs": 0}):
        assert not takes_best(arguments)
    assert not takes_best({}, temperature=0.1, typical_p=0.5)
    for params in ({"repeat_penalty": 1.1}, {"dry_multiplier": 0.5}, {"samplers": "p"}):
        assert not takes_best({}, **params)


def test_the_best_token_is_taken_exactly_where_sample_would_return_it() -> None:
    sampler = LogitSampler(SamplingDefaults(temperature=0), seed=1, masked_tokens={0, 2})
    for seed in range(50):
        logits = np.random.default_rng(seed).integers(0, 3, 5).astype(np.float32)  # with ties
        best = int(logits.argmax())
        expected = sampler.sample(logits.copy(), [], 0)
        assert sampler.sample(logits, [], 0, best) == expected
        assert (expected == best) == (best not in {0, 2})


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.array([9.0, 1.0, 8.0, 0.0], np.float32)
    for temperature in (0, 1):
        params = SamplingDefaults(temperature=temperature, top_k=0, top_p=1, min_p=0)
        sampler = LogitSampler(params, seed=1, masked_tokens={0, 2})
        assert {sampler.sample(logits, [0] * n, 0) for n in range(50)} <= {1, 3}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_p": 0.9},
        {"min_p": 1e-4},
        {"top_p": 0.999, "min_p": 1e-4},
        {"typical_p": 0.9},
        {"top_n_sigma": 3},
        {"dynatemp_range": 0.5},
        {"xtc_probability": 1, "xtc_threshold": 1e-5},
        {"mirostat": 2},
        {"adaptive_target": 0.1},
    ],
    ids=str,
)
def test_masked_tokens_of_a_large_vocabulary_change_nothing_for_the_others(params: dict[str, Any]) -> None:
    unmasked = random_logits(5000, seed=6, spread=2)
    masked = set(range(1, 10_000, 2))
    logits = np.full(10_000, 50, np.float32)
    logits[::2] = unmasked
    chosen = SamplingDefaults(**{**OFF, **params})
    few, many = LogitSampler(chosen, seed=1), LogitSampler(chosen, seed=1, masked_tokens=masked)
    expected = [2 * few.sample(unmasked.copy(), [0] * n, 0) for n in range(1, 30)]
    assert [many.sample(logits.copy(), [0] * n, 0) for n in range(1, 30)] == expected


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_job_is_rejected_if_no_token_is_left(temperature: float) -> None:
    sampler = LogitSampler(SamplingDefaults(temperature=temperature), seed=1, masked_tokens=range(100))
    with pytest.raises(JobRejected) as refused:
        sampler.sample(random_logits(100, seed=1), [0], 1)
    assert refused.value.code == ErrorCode.GRAMMAR_EXHAUSTED


@pytest.mark.parametrize(("temperature", "bad"), [(0, np.nan), (0, np.inf), (1.0, np.inf)])
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


def test_a_repeat_penalty_that_would_make_a_logit_infinite_is_refused() -> None:
    with pytest.raises(ValidationError, match="repeat_penalty"):
        SamplingDefaults(repeat_penalty=5e-324)
    sampler = LogitSampler(SamplingDefaults(repeat_penalty=0.01), seed=1)
    assert sampler.sample(np.full(50, 1e30, dtype=np.float32), [0, 1, 2], 1) in (0, 1, 2)
