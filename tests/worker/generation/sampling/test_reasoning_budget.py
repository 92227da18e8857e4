"""The limit of reasoning: when the tokens of the closing tag are forced."""

from __future__ import annotations

import numpy as np
import pytest

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.generation.sampling.reasoning_budget import ReasoningBudget

OPENING, CLOSING = "<think>", "</think>"
PIECES = [
    *"abc",
    OPENING,
    "</th",
    "ink>",
    "</",
    "think",
    ">",
    "é".encode()[:1],
    "é".encode()[1:],
    CLOSING,
    " <thi",
    "nk> x",
]
A, OPEN, CLOSE_1, CLOSE_2, E_1, E_2, CLOSE = 0, 3, 4, 5, 9, 10, 11


def piece(token: int) -> bytes:
    found = PIECES[token]
    return found if isinstance(found, bytes) else found.encode()


def budget(limit: int, prompt: str = "") -> ReasoningBudget:
    return ReasoningBudget(limit, OPENING.encode(), CLOSING.encode(), [CLOSE_1, CLOSE_2], piece, prompt.encode())


def forced(found: ReasoningBudget, *generated: int) -> int | None:
    return found.forced_token([7, 7, *generated], 2)


def test_the_closing_tag_is_forced_token_by_token_after_the_limit() -> None:
    found = budget(3)
    history = [OPEN, A, A, A, CLOSE_1, CLOSE_2, A]
    steps = [forced(found, *history[:n]) for n in range(len(history) + 1)]
    assert steps == [None, None, None, None, CLOSE_1, CLOSE_2, None, None]
    resumed = [forced(budget(3), *history[:n]) for n in range(len(history) + 1)]
    assert resumed == steps  # a worker that resumes the job knows the tokens alone


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("hi<think>\n", True), ("<think>x</think>", False), ("<think>a</think><think>", True), ("", False)],
)
def test_the_prompt_may_have_begun_the_reasoning(prompt: str, is_open: bool) -> None:
    assert forced(budget(0, prompt)) == (CLOSE_1 if is_open else None)


def test_the_tags_may_consist_of_other_tokens() -> None:
    assert forced(budget(2), 12, 13, A, A) == CLOSE_1
    assert forced(budget(2), OPEN, A, 6, 7, 8, A, A) is None  # closed by the model itself


def test_reasoning_that_ends_before_the_limit_is_not_changed() -> None:
    found = budget(3)
    assert [forced(found, *[OPEN, A, CLOSE, A, A, A, A][:n]) for n in range(8)] == [None] * 8
    assert forced(found, OPEN, A, CLOSE, A, A, A, A, OPEN, A) is None  # the limit is for the whole output
    assert forced(found, OPEN, A, CLOSE, A, A, A, A, OPEN, A, A) == CLOSE_1


def test_a_character_is_completed_before_the_tag() -> None:
    found = budget(2)
    assert forced(found, OPEN, A, E_1) is None
    assert forced(found, OPEN, A, E_1, E_2) == CLOSE_1


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("mirostat", [0, 2])
def test_a_forced_token_is_drawn_although_it_is_masked(temperature: float, mirostat: int) -> None:
    params = SamplingDefaults(temperature=temperature, mirostat=mirostat)
    sampler = LogitSampler(params, seed=1, masked_tokens=[CLOSE_1], reasoning=budget(1, OPENING))
    logits = np.arange(len(PIECES), dtype=np.float32)
    logits[[OPEN, CLOSE, 12]] = -50
    first = sampler.sample(logits.copy(), [7, 7], 2)
    drawn = [first]
    for _ in range(2):
        drawn.append(sampler.sample(logits.copy(), [7, 7, *drawn], 2, drawn=13))
    assert drawn == [first, CLOSE_1, CLOSE_2]
