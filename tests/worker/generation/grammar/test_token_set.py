from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.token_sets import set_of_mask

from llamaq.worker.generation.grammar import token_set
from llamaq.worker.generation.grammar.token_set import TokenSet

SIZES = [1, 7, 8, 31, 32, 33, 63, 64, 65, 100, 1000]
SHARES = [0, 0.002, 0.1, 0.5, 0.99, 1]


@given(
    n_vocab=st.one_of(st.sampled_from(SIZES), st.integers(1, 3000)),
    share=st.sampled_from(SHARES),
    is_clustered=st.booleans(),
    n_extra_bytes=st.integers(0, 9),
    seed=st.integers(0, 10**6),
)
def test_a_set_is_that_of_the_unpacked_bits(
    n_vocab: int, share: float, is_clustered: bool, n_extra_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.random(-(-n_vocab // 8) * 8) < share  # also after the last token
    if is_clustered:
        bits.sort()
    packed = np.packbits(bits, bitorder="little").tobytes() + b"\xff" * n_extra_bytes
    mask = bits[:n_vocab]
    tokens = TokenSet(packed, n_vocab)
    expected = np.flatnonzero(mask)
    assert len(tokens) == expected.size
    assert bool(tokens) == mask.any()
    assert tokens.ids().tolist() == expected.tolist()
    assert [token in tokens for token in range(n_vocab)] == mask.tolist()
    some = rng.integers(0, n_vocab, 20)
    assert (tokens.contained(some) == mask[some]).all()
    logits = rng.normal(size=n_vocab).astype(np.float32)
    logits[rng.integers(n_vocab)] = -np.inf
    masked = np.where(mask, logits, np.float32(-np.inf))
    tokens.mask_others(logits)
    assert (logits == masked).all()


@pytest.mark.parametrize("n_vocab", SIZES)
def test_a_set_of_a_mask_has_the_tokens_for_which_it_is_true(n_vocab: int) -> None:
    mask = np.random.default_rng(n_vocab).random(n_vocab) < 0.5
    assert set_of_mask(mask).ids().tolist() == np.flatnonzero(mask).tolist()
    every = set_of_mask(np.ones(n_vocab, np.bool_))
    assert (len(every), every.ids().tolist()) == (n_vocab, list(range(n_vocab)))


@pytest.mark.parametrize("n_vocab", SIZES)
def test_an_empty_set_masks_every_logit(n_vocab: int) -> None:
    nothing = TokenSet.empty(n_vocab)
    assert not nothing
    assert nothing.ids().size == 0
    logits = np.zeros(n_vocab, np.float32)
    nothing.mask_others(logits)
    assert (logits == -np.inf).all()


def test_no_token_outside_the_vocabulary_is_in_a_set() -> None:
    every = TokenSet(b"\xff" * 16, 33)
    assert [token for token in range(-200, 200) if token in every] == list(range(33))


def test_masking_changes_no_logit_of_the_set_and_hides_infinity_but_not_nan() -> None:
    logits = np.array([-0.0, np.nan, np.inf, -np.inf, np.nan, np.inf, 3.0], np.float32)
    set_of_mask(np.array([1, 1, 1, 1, 0, 0, 0], np.bool_)).mask_others(logits)
    assert np.signbit(logits[0])
    assert np.isnan(logits[[1, 4]]).all()
    assert logits[[2, 3, 5, 6]].tolist() == [np.inf, -np.inf, -np.inf, -np.inf]


def test_the_tokens_are_counted_with_numpy_1_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_set, "NUMPY_COUNTS_BITS", False)
    mask = np.random.default_rng(1).random(5000) < 0.3
    assert len(set_of_mask(mask)) == np.count_nonzero(mask)


def test_a_set_does_not_change() -> None:
    tokens = set_of_mask(np.arange(100) % 3 == 0)
    with pytest.raises(ValueError, match="read-only"):
        tokens.ids()[0] = 1
    assert tokens.ids() is tokens.ids()
    assert repr(tokens) == "<TokenSet 34 of 100>"
