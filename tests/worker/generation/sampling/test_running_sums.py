from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaq.worker.generation.sampling.running_sums import BLOCK, MAX_SINGLE, RunningSums


@given(
    seed=st.integers(0, 10**6),
    n=st.sampled_from([1, 2, MAX_SINGLE, MAX_SINGLE + 1, 3 * BLOCK, 5003]),
    share_of_zeros=st.sampled_from([0.0, 0.5, 0.99]),
    fraction=st.floats(0, 1, exclude_max=True),
)
def test_the_found_sum_is_that_of_adding_one_weight_after_the_other(
    seed: int, n: int, share_of_zeros: float, fraction: float
) -> None:
    rng = np.random.default_rng(seed)
    # Sums of small multiples of 1/8 have no rounding error.
    weights = (rng.integers(1, 9, n) * (rng.random(n) >= share_of_zeros) / 8).astype(np.float32)
    weights[rng.integers(n)] = 1
    sums, expected = RunningSums(weights), weights.cumsum(dtype=np.float64)
    assert sums.total == expected[-1]
    for value in (fraction * sums.total, np.floor(fraction * sums.total)):  # the second is often equal to a sum
        assert sums.first_above(value) == expected.searchsorted(value, "right")


@pytest.mark.parametrize("n", [5, BLOCK, 4 * BLOCK + 7])
def test_a_weight_of_0_is_not_found_above_all_sums(n: int) -> None:
    weights = np.zeros(n, np.float32)
    weights[[1, 3]] = 1
    assert RunningSums(weights).first_above(2.0) == 3
