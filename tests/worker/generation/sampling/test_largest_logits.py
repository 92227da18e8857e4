from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.llama_samplers import random_logits

from llamaq.worker.generation.sampling.largest_logits import top_k_superset


@given(
    n=st.integers(1, 3000),
    k=st.integers(1, 300),
    seed=st.integers(0, 10**6),
    n_levels=st.sampled_from([1, 3, 10**6]),
    share_masked=st.sampled_from([0, 0.5, 0.99]),
)
def test_the_superset_has_the_largest_logits_and_all_others_that_are_as_large(
    n: int, k: int, seed: int, n_levels: int, share_masked: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, n_levels, n).astype(np.float32)
    logits[rng.random(n) < share_masked] = -np.inf
    indices, largest = top_k_superset(logits, k)
    found = indices.tolist()
    assert largest == logits.max()
    assert found == sorted(found)
    assert len(found) >= min(k, np.isfinite(logits).sum())
    assert found == (np.flatnonzero(logits >= logits[found].min()).tolist() if found else [])
    assert -np.inf not in logits[found]


def test_the_superset_of_a_large_vocabulary_is_small() -> None:
    for n_vocab in (32_000, 128_256, 151_936, 151_999):
        assert len(top_k_superset(random_logits(n_vocab, n_vocab), 40)[0]) < 80


@pytest.mark.parametrize("places", [[0], [500], [1022], [1, 1022], range(1023)])
def test_the_largest_logit_is_nan_if_any_logit_is_nan(places: list[int]) -> None:
    logits = random_logits(1023, 1)
    logits[places] = np.nan
    assert np.isnan(top_k_superset(logits, 2)[1])
