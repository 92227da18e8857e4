"""The probabilities of a prompt's tokens equal those of a bare llama.cpp, whatever else the worker does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.prompt_oracle import PromptOracle

from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.producer import Client

TEXT = "Once upon a time there was a little dog called Rex, and he lived in the tower with a silver bell."
TOLERANCE = 1e-3
ALONE: Any = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 3}


@pytest.fixture(scope="module")
def oracle(demo_model: Path) -> PromptOracle:
    return PromptOracle(demo_model)


def check(found: PromptLogprobs | None, tokens: Sequence[int], oracle: PromptOracle, n_top: int) -> None:
    """Assert that there is one entry for each token, with the probabilities of the oracle."""
    assert found is not None
    assert found.tokens == tuple(tokens)
    assert found[0] is None
    assert len(found) == len(tokens)
    expected = oracle.logprobs(tokens)
    for position, entry in enumerate(found[1:], 1):
        row = expected[position - 1]
        assert entry is not None
        assert entry.token == tokens[position]
        assert entry.logprob == pytest.approx(row[entry.token], abs=TOLERANCE)
        assert len(entry.top) == n_top
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[: -n_top - 1 : -1], abs=TOLERANCE)
        for token, value in entry.top:
            assert value == pytest.approx(row[token], abs=TOLERANCE)
        assert entry.rank is not None
        own = row[entry.token]
        assert (row > own + TOLERANCE).sum() < entry.rank <= (row > own - TOLERANCE).sum()


def test_the_values_are_those_of_llama_cpp(client: Client, oracle: PromptOracle) -> None:
    tokens = client.tokenize(TEXT)
    for n_top in (0, 1, 3, 20):
        result = client.generate(TEXT, **ALONE | {"prompt_logprobs": n_top})
        check(result.prompt_logprobs, tokens, oracle, n_top)
        assert result.stats.prefix_cache_tokens == 0
