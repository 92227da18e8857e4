from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from threading import Event, Thread
from time import sleep
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.llama_samplers import random_logits
from tests.support.token_sets import set_of_mask

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.grammar.token_constraint import TokenConstraint
from llamaq.worker.generation.grammar.token_set import TokenSet
from llamaq.worker.generation.sampling.allowed_tokens import AllowedTokens
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler

N_VOCAB = 3000
WAIT_S = 60.0


class FixedMask:
    """A grammar that allows the same tokens in each step."""

    n_accepted = 0

    def __init__(self, mask: npt.NDArray[np.bool_]) -> None:
        self.mask = mask

    def accept(self, history: Sequence[int], n_prompt: int, n_history: int | None = None) -> None:
        """Accept every token."""

    def allowed_tokens(self) -> TokenSet:
        return set_of_mask(self.mask)

    def allowed_along(self, draft: Sequence[int]) -> Iterator[TokenSet]:
        return (self.allowed_tokens() for _ in range(len(draft) + 1))

    def allowed_along_forced(self, n_max: int, never: Container[int] = ()) -> Iterator[TokenSet]:
        return self.allowed_along(())

    def end_token_in(self, allowed: TokenSet) -> int | None:
        return 7 if 7 in allowed else None


def grammar_of(mask: npt.NDArray[np.bool_]) -> TokenConstraint:
    return cast("TokenConstraint", FixedMask(mask))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "repeat_penalty": 1.5},
        {"temperature": 0, "dry_multiplier": 0.8},
        {},
        {"repeat_penalty": 1.5},
        {"top_k": 0, "min_p": 0.01},
        {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 2},
        {"mirostat": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 0.999])
def test_the_draw_is_that_without_the_other_tokens(params: dict[str, Any], share: float) -> None:
    rng = np.random.default_rng(8)
    mask = rng.random(N_VOCAB) < share
    mask[5] = True
    masked = np.flatnonzero(~mask).tolist()
    restricted = LogitSampler(SamplingDefaults(**params), seed=3, grammar=grammar_of(mask))
    expected = LogitSampler(SamplingDefaults(**params), seed=3, masked_tokens=masked)
    history = [5, 6]
    for step in range(30):
        logits = np.round(random_logits(N_VOCAB, step, 2.0), 1)  # with ties
        token = restricted.sample(logits.copy(), history, 1)
        assert token == expected.sample(logits.copy(), history, 1)
        assert mask[token]
        history.append(token)


def test_the_logits_are_not_masked_where_the_best_token_is_allowed() -> None:
    logits, mask = random_logits(N_VOCAB, 1), np.ones(N_VOCAB, np.bool_)
    mask[:100] = False
    logits[300] = 50
    given = logits.copy()
    candidates = AllowedTokens(grammar_of(mask), None, n_best=1).restrict(given, [1], 1)
    assert [candidates.token_at(index) for index in range(len(candidates))] == [300]
    assert (given == logits).all()


def test_the_best_token_is_drawn_without_another_search_where_it_is_allowed() -> None:
    mask = np.arange(N_VOCAB) % 2 == 0
    sampler = LogitSampler(SamplingDefaults(temperature=0), seed=1, grammar=grammar_of(mask), masked_tokens=[8])
    logits = np.zeros(N_VOCAB, np.float32)
    logits[[8, 20, 301]] = 3, 1, 2
    assert sampler.sample(logits.copy(), [1], 1, drawn=500) == 500, "the best token as claimed, although 20 is better"
    assert sampler.sample(logits.copy(), [1], 1, drawn=301) == 20
    assert sampler.sample(logits.copy(), [1], 1, drawn=8) == 20
    assert sampler.sample(logits.copy(), [1], 1) == 20


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"top_k": 1}, {}, {"top_k": 300}, {"top_k": 2 * N_VOCAB}], ids=str
)
@pytest.mark.parametrize("n_refused", [0, 3, 30, 2000])
def test_the_largest_logits_may_belong_to_tokens_that_are_not_allowed(params: dict[str, Any], n_refused: int) -> None:
    restricted, expected = [], []
    for step in range(20):
        logits = random_logits(N_VOCAB, step)
        mask = np.ones(N_VOCAB, np.bool_)
        mask[logits.argsort()[N_VOCAB - n_refused :]] = False
        restricted.append(LogitSampler(SamplingDefaults(**params), seed=step, grammar=grammar_of(mask)))
        expected.append(
            LogitSampler(SamplingDefaults(**params), seed=step, masked_tokens=np.flatnonzero(~mask).tolist())
        )
        drawn = restricted[-1].sample(logits.copy(), [1], 1)
        assert drawn == expected[-1].sample(logits.copy(), [1], 1)
        assert restricted[-1].sample(logits.copy(), [1], 1, int(logits.argmax())) == drawn


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"repeat_penalty": 1.5}, {"top_k": 0, "min_p": 0.1}], ids=str
)
@pytest.mark.parametrize("share", [0.001, 0.05, 0.9])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_of_an_allowed_token_that_is_not_finite_fails_the_job(
    params: dict[str, Any], share: float, bad: float
) -> None:
    mask = np.random.default_rng(3).random(N_VOCAB) < share
    mask[40] = True
    logits = random_logits(N_VOCAB, 1)
    logits[40] = bad
    sampler = LogitSampler(SamplingDefaults(**params), seed=1, grammar=grammar_of(mask))
    with pytest.raises(JobRejected) as refused:
        sampler.sample(logits, [1], 1)
    assert refused.value.code == ErrorCode.DECODE_FAILED


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"repeat_penalty": 1.5}, {"top_k": 0, "min_p": 0.1}], ids=str
)
@pytest.mark.parametrize("share", [0.001, 0.05, 0.9])
def test_infinity_at_a_token_that_is_not_allowed_does_not_reach_the_draw(params: dict[str, Any], share: float) -> None:
    mask = np.random.default_rng(3).random(N_VOCAB) < share
    mask[:50] = True
    mask[40] = False
    logits = random_logits(N_VOCAB, 1)
    logits[40] = np.inf
    sampler = LogitSampler(SamplingDefaults(**params), seed=1, grammar=grammar_of(mask))
    assert mask[sampler.sample(logits, [1], 1)]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_only_a_masked_end_token_is_left(temperature: float) -> None:
    mask = np.zeros(N_VOCAB, np.bool_)
    sampler = LogitSampler(
        SamplingDefaults(temperature=temperature), seed=1, masked_tokens=[7], grammar=grammar_of(mask)
    )
    with pytest.raises(JobRejected) as refused:
        sampler.sample(random_logits(N_VOCAB, 1), [1], 1)
    assert refused.value.code == ErrorCode.GRAMMAR_EXHAUSTED
    mask[7] = True
    assert sampler.sample(random_logits(N_VOCAB, 1), [1], 1) == 7


class CountingGrammar(FixedMask):
    """Counts its steps. `accept` fails for the token 13, and waits for `may_step`."""

    def __init__(self) -> None:
        super().__init__(np.arange(N_VOCAB) % 2 == 0)
        self.accepted: list[list[int]] = []
        self.may_step = Event()
        self.is_stepping = Event()
        self.n_at_once = 0

    def accept(self, history: Sequence[int], n_prompt: int, n_history: int | None = None) -> None:
        self.n_at_once += 1
        assert self.n_at_once == 1, "two threads use the grammar"
        self.is_stepping.set()
        assert self.may_step.wait(WAIT_S)
        generated = list(history[n_prompt:n_history])
        self.accepted.append(generated)
        self.n_at_once -= 1
        if 13 in generated:
            raise JobRejected(ErrorCode.INVALID_GRAMMAR, "unlucky")


def test_a_draw_waits_for_a_preparation_in_another_thread() -> None:
    grammar = CountingGrammar()
    sampler = LogitSampler(SamplingDefaults(temperature=0), seed=1, grammar=cast("TokenConstraint", grammar))
    assert sampler.can_prepare
    logits = random_logits(N_VOCAB, 1)
    drawn: list[int] = []
    preparing = Thread(target=sampler.prepare, args=([1, 5], 1, 2, ()))
    preparing.start()
    assert grammar.is_stepping.wait(WAIT_S)
    drawing = Thread(target=lambda: drawn.append(sampler.sample(logits, [1, 5], 1)))
    drawing.start()
    drawing.join(0.05)
    assert not drawn, "the grammar is in use"
    grammar.may_step.set()
    drawing.join(WAIT_S)
    preparing.join(WAIT_S)
    assert grammar.accepted == [[5]], "the draw needs no step of its own"
    assert drawn[0] % 2 == 0


def test_a_draw_does_not_wait_for_the_masks_of_the_rest_of_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = CountingGrammar()
    grammar.may_step.set()
    allowed, draft = AllowedTokens(cast("TokenConstraint", grammar), None), (4,) * 16
    draws: list[Thread] = []
    n_masks = 0

    def masks(_: Sequence[int]) -> Iterator[TokenSet]:
        nonlocal n_masks
        while n_masks <= len(draft):
            n_masks += 1
            yield grammar.allowed_tokens()
            if n_masks == 3:
                draws.append(Thread(target=allowed.allows, args=(2, [1, 5], 1)))
                draws[0].start()
            while n_masks == 3 and not allowed._look_ahead.is_awaited:
                sleep(0)

    monkeypatch.setattr(grammar, "allowed_along", masks)
    allowed.prepare([1, 5], 1, 2, draft)
    draws[0].join(WAIT_S)
    assert n_masks == 4
    assert allowed.allows(2, [1, 5, *draft[:3]], 1)
    assert grammar.accepted == [[5]], "three masks are prepared"
    assert allowed.allows(2, [1, 5, *draft[:4]], 1)
    assert grammar.accepted[1:] == [[5, *draft[:4]]], "the next one is not"


def test_after_a_draw_nothing_is_prepared_for_it() -> None:
    grammar = CountingGrammar()
    grammar.may_step.set()
    allowed = AllowedTokens(cast("TokenConstraint", grammar), None)
    assert allowed.allows(2, [1, 5], 1)
    allowed.prepare([1, 5], 1, 2, (4, 4))
    assert grammar.accepted == [[5]]
    allowed.prepare([1, 5, 4], 1, 3, (4, 4))
    assert grammar.accepted == [[5], [5, 4]]


def test_the_next_draws_raise_an_error_of_the_preparation() -> None:
    grammar = CountingGrammar()
    grammar.may_step.set()
    sampler = LogitSampler(SamplingDefaults(), seed=1, grammar=cast("TokenConstraint", grammar))
    sampler.prepare([1, 13], 1, 2, ())
    for _ in range(2):
        with pytest.raises(JobRejected, match="unlucky"):
            sampler.sample(random_logits(N_VOCAB, 1), [1, 13], 1)
    assert grammar.accepted == [[13]], "after the error, the grammar is not used"


@pytest.mark.interpreted
def test_an_error_of_the_preparation_is_known_before_a_draw_that_waits_for_it_may_use_the_grammar() -> None:
    grammar = CountingGrammar()
    grammar.may_step.set()
    allowed = AllowedTokens(cast("TokenConstraint", grammar), None)
    known = []

    class DrawingLock:
        """When it is released, the draw that has waited for it continues at once."""

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            known.append(allowed._error)

    allowed._lock = cast("Any", DrawingLock())
    allowed.prepare([1, 13], 1, 2, ())
    assert [str(error) for error in known] == ["invalid_grammar: unlucky"]


def test_without_a_grammar_there_is_nothing_to_prepare() -> None:
    sampler = LogitSampler(SamplingDefaults(), seed=1)
    assert not sampler.can_prepare
    sampler.prepare([1], 1, 1, ())
    constrained = LogitSampler(SamplingDefaults(), seed=1, grammar=grammar_of(np.ones(N_VOCAB, np.bool_)))
    constrained.close()
    constrained.prepare([1], 1, 1, ())
