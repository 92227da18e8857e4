"""The sampler `infill` keeps the tokens that llama.cpp's sampler of this name keeps."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.llama_samplers import llama_chain

from llamaq.common.protocol.sampler_names import SamplerName
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.sampling.candidates import Candidates
from llamaq.worker.generation.sampling.infill_sampler import MAX_COMPARED, InfillTokens, infill
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler

WORDS = ("The them there a an and in into int return ret re self.items items it (x) (xs ) \n \n\n    " * 2).split(" ")
PIECES = {1: b"hel", 2: b"hell", 3: b"hello", 4: b"dummy", 5: b"", 6: b"", 7: b"other"}
EOS, EOT = 5, 6


def tokens(*, end: int | None = EOT, min_tokens: int = 0) -> InfillTokens:
    return InfillTokens(PIECES.__getitem__, frozenset({EOS, EOT}), end, min_tokens)


def kept(chances: dict[int, float], known: InfillTokens | None = None, position: int = 0) -> set[int]:
    """Return the tokens that are left of tokens with these probabilities."""
    logits = np.log(np.array(list(chances.values()), np.float32))
    left = infill(Candidates(logits, np.array(list(chances))), known or tokens(), position)
    return {left.token_at(index) for index in range(len(left))}


def words_of(vocab: Vocab) -> list[int]:
    """Return tokens of which some begin with others, and all end tokens."""
    found = {token for word in WORDS for token in vocab.encode_part(word)}
    return sorted(found | vocab.end_tokens)


@settings(max_examples=400)
@given(
    st.integers(0, 10**6), st.floats(0.5, 6), st.integers(1, 60), st.floats(0.5, 0.99) | st.just(1.0), st.floats(-12, 3)
)
def test_the_same_tokens_are_kept_as_by_llama_cpp(
    vocab: Vocab, seed: int, spread: float, top_k: int, top_p: float, end_bias: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = np.full(vocab.n_tokens, -60, np.float32)
    logits[words_of(vocab)] = rng.normal(size=len(words_of(vocab))) * spread
    logits[sorted(vocab.end_tokens)] += end_bias

    def kept_by_llama_cpp(scale: float, p: float) -> set[int]:
        makers = [
            llama_cpp.llama_sampler_init_top_k(top_k),
            llama_cpp.llama_sampler_init_top_p(p, 0),
            llama_cpp.llama_sampler_init_infill(vocab.pointer),
        ]
        return set(llama_chain((logits * scale).astype(np.float32), makers))

    expected = kept_by_llama_cpp(1.0, top_p)
    nudged = [kept_by_llama_cpp(scale, p) for scale in (0.998, 1.002) for p in (top_p * 0.9995, min(top_p * 1.0005, 1))]
    assume(all(each == expected for each in nudged))  # no bound is as close as a rounding error
    params = SamplingDefaults(samplers=["top_k", "top_p", "infill"], top_k=top_k, top_p=top_p)
    known = InfillTokens(vocab.piece, vocab.end_tokens, vocab.end_of_turn, 0)
    sampler = LogitSampler(params, seed=seed, end_tokens=vocab.end_tokens, infill_tokens=known)
    found = sampler._filtered(Candidates(logits), [1], 0)
    assert {found.token_at(index) for index in range(len(found))} == expected
    assert sampler.sample(logits, [1], 0) in expected


@given(st.integers(0, 10**6), st.sampled_from([0, 0.5]))
def test_tokens_that_top_n_sigma_has_masked_are_counted_as_in_llama_cpp(
    vocab: Vocab, seed: int, dynatemp_range: float
) -> None:
    rng = np.random.default_rng(seed)
    n, top_k = float(rng.uniform(0.5, 4)), int(rng.integers(20, 60))
    logits = np.full(vocab.n_tokens, -60, np.float32)
    logits[words_of(vocab)] = rng.normal(size=len(words_of(vocab))) * rng.uniform(0.5, 3)
    logits[sorted(vocab.end_tokens)] += rng.uniform(-4, 2)

    def kept_by_llama_cpp(scale: float) -> set[int]:
        makers = [
            llama_cpp.llama_sampler_init_top_n_sigma(n),
            llama_cpp.llama_sampler_init_top_k(top_k),
            llama_cpp.llama_sampler_init_infill(vocab.pointer),
        ]
        return set(llama_chain((logits * scale).astype(np.float32), makers))

    expected = kept_by_llama_cpp(1.0)
    assume(all(kept_by_llama_cpp(scale) == expected for scale in (0.998, 1.002)))
    order: list[SamplerName] = ["top_n_sigma", "top_k", "infill", "temperature"]
    params = SamplingDefaults(samplers=order, top_n_sigma=n, top_k=top_k, dynatemp_range=dynatemp_range)
    known = InfillTokens(vocab.piece, vocab.end_tokens, vocab.end_of_turn, 0)
    sampler = LogitSampler(params, seed=seed, end_tokens=vocab.end_tokens, infill_tokens=known)
    found = sampler._filtered(Candidates(logits), [1], 0)
    assert {found.token_at(index) for index in range(len(found))} == expected


def test_the_example_of_llama_cpp() -> None:
    assert kept({1: 0.5, 2: 0.2, 3: 0.1, 4: 0.2}) == {1}  # the first three have 0.8 together, dummy a share of 0.2
    assert kept({1: 0.4, 2: 0.1, 4: 0.4, 7: 0.1}) == {1, 4}


def test_an_end_is_drawn_unless_a_text_is_far_more_probable() -> None:
    assert kept({1: 0.58, 4: 0.3, EOS: 0.12}) == {EOS}  # 0.12, times 3 candidates, times 3, is more than 0.88
    assert kept({1: 0.65, 4: 0.3, EOS: 0.05}) == {1, EOS}  # of 1 and 4, the share of 4 is below a third


@pytest.mark.parametrize(
    ("known", "position", "drawn"),
    [(tokens(), 0, EOT), (tokens(end=None), 0, 20), (tokens(min_tokens=3), 2, 20), (tokens(min_tokens=3), 3, EOT)],
    ids=["ends", "may not end", "too early", "not too early"],
)
def test_the_end_is_drawn_only_where_the_job_may_end(known: InfillTokens, position: int, drawn: int) -> None:
    known = known._replace(piece=lambda token: b"%d." % token)
    even = {token: 0.1 + (0.01 if token == 20 else 0) for token in range(20, 30)}  # none has 0.2
    assert kept(even, known, position) == {drawn}


def test_thousands_of_candidates_are_not_compared_with_each_other() -> None:
    n_pieces, end = 0, 30_000

    def piece(token: int) -> bytes:
        nonlocal n_pieces
        n_pieces += 1
        return b"%d" % token

    logits = np.linspace(0, 1, 20_000, dtype=np.float32)
    left = infill(Candidates(logits, np.arange(20_000)), InfillTokens(piece, frozenset({end}), end, 0), 0)
    assert (len(left), left.token_at(0), n_pieces) == (1, end, MAX_COMPARED)
