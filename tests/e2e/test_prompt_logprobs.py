"""The probabilities of a prompt's tokens equal those of a bare llama.cpp, whatever else the worker does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.prompt_oracle import PromptOracle

from llamaq.common.protocol.job_outcome import FinishReason
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


def test_long_prompts_beside_streams_have_an_entry_for_each_token(client: Client, oracle: PromptOracle) -> None:
    streams = [client.submit(TEXT, max_tokens=60, ignore_eos=True) for _ in range(2)]
    jobs = [client.submit(f"{number} " + TEXT * 30, max_tokens=0, prompt_logprobs=1) for number in range(2)]
    for number, job in enumerate(jobs):
        found = job.result().prompt_logprobs
        tokens = client.tokenize(f"{number} " + TEXT * 30)
        assert found is not None
        assert found.tokens == tuple(tokens)
        expected = oracle.logprobs(tokens)
        values = [entry.logprob for entry in found if entry is not None]
        wanted = [row[token] for row, token in zip(expected, tokens[1:], strict=False)]
        assert np.abs(np.subtract(values, wanted)).mean() < 0.05
    assert all(len(stream.result().tokens) == 60 for stream in streams)


def test_a_stream_has_the_scores_of_its_prompt_once(client: Client) -> None:
    for max_tokens in (0, 1, 5):
        options: Any = {"max_tokens": max_tokens, "prompt_logprobs": 1, "temperature": 0, "ignore_eos": True}
        stream = client.stream(TEXT, **options)
        scored = [chunk.prompt_logprobs for chunk in stream if chunk.prompt_logprobs is not None]
        result = stream.job.result()
        assert result.prompt_logprobs is not None
        assert scored == [result.prompt_logprobs] * min(max_tokens, 1)
        assert (len(result.tokens), result.finish_reason) == (max_tokens, FinishReason.LENGTH)


def test_a_checkpoint_keeps_the_scores_of_a_job_without_events(client: Client) -> None:
    job = client.submit(TEXT, max_tokens=200, prompt_logprobs=1, stream=False, ignore_eos=True)
    found = job.result().prompt_logprobs
    assert found is not None
    assert len(found) == len(client.tokenize(TEXT))
    assert next(iter(job.stream())).prompt_logprobs == found
