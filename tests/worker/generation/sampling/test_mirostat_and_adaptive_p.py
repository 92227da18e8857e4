from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.llama_samplers import LlamaSampler, random_logits, softmax

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling.candidates import Candidates
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.generation.sampling.mirostat_and_adaptive_p import Mirostat1, draw_feedback

N_VOCAB = 130
KINDS = ["mirostat", "mirostat-2", "adaptive-p"]


def params_of(kind: str, tau: float, eta: float) -> SamplingDefaults:
    """Return parameters of this kind of sampler. For adaptive-p, `tau` / 10 is the target and `eta` the decay."""
    if kind == "adaptive-p":
        return SamplingDefaults(adaptive_target=tau / 10, adaptive_decay=eta, samplers=["adaptive_p"])
    return SamplingDefaults(mirostat=2 if kind == "mirostat-2" else 1, mirostat_tau=tau, mirostat_eta=eta)


def llama_sampler(kind: str, params: SamplingDefaults) -> LlamaSampler:
    tau, eta = params.mirostat_tau, params.mirostat_eta
    makers: dict[str, Callable[[], Any]] = {
        "mirostat": lambda: llama_cpp.llama_sampler_init_mirostat(N_VOCAB, 7, tau, eta, 100),
        "mirostat-2": lambda: llama_cpp.llama_sampler_init_mirostat_v2(7, tau, eta),
        "adaptive-p": lambda: llama_cpp.llama_sampler_init_adaptive_p(params.adaptive_target, params.adaptive_decay, 7),
    }
    return LlamaSampler(makers[kind]())


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(0, 10**6),
    spread=st.floats(0.8, 5),
    tau=st.floats(0.3, 7),
    eta=st.floats(0.01, 0.95),
)
@settings(max_examples=15)
def test_a_series_of_draws_has_the_distributions_of_llama_cpp(
    kind: str, seed: int, spread: float, tau: float, eta: float
) -> None:
    params = params_of(kind, tau, eta)
    llama, ours = llama_sampler(kind, params), draw_feedback(params, [])
    assert ours is not None
    for step in range(6):
        logits = random_logits(N_VOCAB, seed + step, spread)
        shaped, fed_back = ours.shape(Candidates(logits), step, N_VOCAB)
        kept, drawn = llama.apply(dict(enumerate(logits.tolist())))
        llama.accept([drawn])
        tokens = [shaped.token_at(index) for index in range(len(shaped))]
        if set(tokens) != set(kept):  # a border is as close as a rounding error, or k is beyond llama.cpp's int
            assert len(set(tokens) ^ set(kept)) == 1 or (kind == "mirostat" and _overflows(ours, logits))
            break
        expected = softmax(np.array([kept[token] for token in tokens]))
        assert shaped.probabilities() == pytest.approx(expected, rel=2e-3, abs=1e-6)
        ours.record(float(fed_back[tokens.index(drawn)]))
    llama.close()


def _overflows(mirostat: object, logits: np.ndarray) -> bool:
    """Return whether Mirostat 1 keeps more tokens than fit into an int: then llama.cpp keeps one."""
    assert isinstance(mirostat, Mirostat1)
    best = np.sort(logits)[::-1][:100].astype(float)
    steps = np.log(np.arange(2, 101) / np.arange(1, 100))
    return mirostat.n_kept(float(steps @ -np.diff(best) / (steps @ steps)), N_VOCAB) > 2**31 - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_job_continues_with_the_state_of_its_draws(kind: str) -> None:
    params = params_of(kind, 3.0, 0.4)

    def draw(sampler: LogitSampler, history: list[int]) -> tuple[int, float]:
        token = sampler.sample(random_logits(N_VOCAB, len(history), 3), history, 1)
        assert sampler.draw_probability is not None
        return token, sampler.draw_probability

    undisturbed, history, draws = LogitSampler(params, seed=5), [0], list[float]()
    for _ in range(12):
        token, probability = draw(undisturbed, history)
        history.append(token)
        draws.append(probability)
    resumed = LogitSampler(params, seed=5, draws=draws[:6])
    again = [draw(resumed, history[:n]) for n in range(7, 13)]
    assert again == list(zip(history[7:], draws[6:], strict=True))
    assert draw(resumed, history[:9]) == again[2], "a token that was drawn again replaces the earlier draw"
    fresh = LogitSampler(params, seed=5)
    assert [draw(fresh, history[:n])[1] for n in range(7, 13)] != draws[6:], "the draws matter"


def test_without_feedback_nothing_is_recorded() -> None:
    for params in ({}, {"adaptive_target": 0.5, "samplers": ["top_k"]}, {"mirostat": 2, "temperature": 0}):
        sampler = LogitSampler(SamplingDefaults(**params), seed=1)
        sampler.sample(random_logits(N_VOCAB, 1), [0], 1)
        assert sampler.draw_probability is None


def test_mirostat_replaces_all_samplers_but_the_temperature() -> None:
    logits, history = random_logits(N_VOCAB, 3), [5, 5, 5]
    plain = LogitSampler(SamplingDefaults(mirostat=2, temperature=0.7), seed=1)
    params = {"repeat_penalty": 9.0, "top_k": 1, "samplers": ["penalties", "top_k"], "dynatemp_range": 0.5}
    busy = LogitSampler(SamplingDefaults(mirostat=2, temperature=0.7, **params), seed=1)
    for n in range(1, 4):
        assert plain.sample(logits.copy(), history[:n], 1) == busy.sample(logits.copy(), history[:n], 1)
    assert plain.draw_probability == busy.draw_probability


def test_mirostat_with_a_single_candidate_draws_it() -> None:
    for version in (1, 2):
        params = SamplingDefaults(mirostat=version)
        masked = np.array([-np.inf, 1, -np.inf], np.float32)
        assert LogitSampler(params, seed=1).sample(masked, [0], 1) == 1
