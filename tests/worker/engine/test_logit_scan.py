"""Draws are the same if several threads have read the logits before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.engine.logit_scan import MIN_ROWS, LogitScan
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler

N_VOCAB = 5003
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 0.8, "top_k": 40, "repeat_penalty": 1.3},
    {"temperature": 1.2, "top_k": 3, "top_p": 1.0, "min_p": 0.0},
]


def samplers() -> list[LogitSampler]:
    """Return a sampler for each row: each kind, also with masked tokens and with a bias."""
    few, many = range(0, N_VOCAB, 500), range(0, N_VOCAB, 7)
    return [
        LogitSampler(SamplingDefaults(**kind), seed=index, masked_tokens=masked, logit_bias=bias)
        for index, kind in enumerate(KINDS)
        for masked, bias in (((), {}), (few, {}), (many, {}), (few, {17: 9.0, 4999: 8.0}))
    ]


def rows(seed: int) -> npt.NDArray[np.float32]:
    drawn: npt.NDArray[np.float32] = np.random.default_rng(seed).standard_normal((len(samplers()), N_VOCAB), np.float32)
    return drawn * 3


@pytest.fixture(params=[2, 3, 7])
def scan(request: pytest.FixtureRequest) -> Iterator[LogitScan]:
    threads = LogitScan(request.param)
    yield threads
    threads.close()


def test_the_draws_are_those_without_threads(scan: LogitScan) -> None:
    alone, read = samplers(), samplers()
    history = [1, 2, 3, 4]
    for seed in range(5):
        expected = [one.sample(row, history, 2) for one, row in zip(alone, rows(seed), strict=True)]
        logits = rows(seed)
        best = scan.read(logits, read)
        drawn = [one.sample(row, history, 2, token) for one, row, token in zip(read, logits, best, strict=True)]
        assert drawn == expected
        history.append(expected[0])


def test_the_best_token_is_found_for_samplers_that_need_it(scan: LogitScan) -> None:
    logits = rows(1)
    best = scan.read(logits, read := samplers())
    for row, sampler, token in zip(logits, read, best, strict=True):
        assert token == (None if sampler.checks_logits else row.argmax())
    assert len(read) > MIN_ROWS
