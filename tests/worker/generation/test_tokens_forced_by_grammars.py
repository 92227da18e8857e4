"""A sampler knows the tokens that its grammar forces, and they are those that it would draw."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import llguidance
import numpy as np
import pytest

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer, TokenConstraint
from llamaq.worker.generation.sampling.allowed_tokens import MAX_FORCED
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler

LONG_NAME = "a_name_of_a_field_that_has_more_tokens_than_one_tick_may_compute_because_it_is_long"
SCHEMA = {
    "type": "object",
    "properties": {
        "date_of_birth": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
        "occupation": {"enum": ["teacher", "engineer", "doctor"]},
        LONG_NAME: {"type": "array", "items": {"enum": ["apple pie", "banana bread"]}, "minItems": 3, "maxItems": 4},
    },
    "required": ["date_of_birth", "occupation", LONG_NAME],
    "additionalProperties": False,
}
PROMPT = [1, 2, 3]
MAX_TOKENS = 200


def constraint_of(vocab: Vocab) -> TokenConstraint:
    return ConstraintTokenizer(vocab).compile(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)))


class Stream:
    """A job whose draws depend on the history only, like those of a model."""

    def __init__(self, vocab: Vocab, params: dict[str, Any], seed: int, **options: Any) -> None:
        self._vocab = vocab
        self._seed = seed
        self.grammar = constraint_of(vocab)
        self.sampler = LogitSampler(SamplingDefaults(**params), seed=seed, grammar=self.grammar, **options)
        self.history = list(PROMPT)
        self.n_draws = 0

    @property
    def has_ended(self) -> bool:
        return self.history[-1] in self._vocab.end_tokens or len(self.history) > MAX_TOKENS

    def prepare(self) -> None:
        self.sampler.prepare(self.history, len(PROMPT), len(self.history), ())

    def forced(self) -> list[int]:
        return list(self.sampler.forced_tokens(self.history, len(PROMPT)))

    def draw(self) -> int:
        """Draw the next token, and append it."""
        rng = np.random.default_rng([self._seed, len(self.history), self.history[-1]])
        logits = rng.normal(0, 2, self._vocab.n_tokens).astype(np.float32)
        self.history.append(self.sampler.sample(logits, self.history, len(PROMPT)))
        self.n_draws += 1
        return self.history[-1]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"temperature": 0.8}, {"repeat_penalty": 1.4}, {"xtc_probability": 0.9}, {"top_n_sigma": 1}],
    ids=str,
)
def test_forced_tokens_are_those_that_are_drawn(vocab: Vocab, params: dict[str, Any], seed: int) -> None:
    random = Random(seed)
    plain, ahead = Stream(vocab, params, seed), Stream(vocab, params, seed)
    while not plain.has_ended:
        plain.draw()
    while not ahead.has_ended:
        if random.random() < 0.9:  # otherwise the other thread had no time
            ahead.prepare()
        ahead.draw()
        forced = ahead.forced()
        if forced and random.random() < 0.9:  # otherwise the batch had no room
            ahead.history += forced[: random.choice([1, 2, MAX_FORCED])]
            if random.random() < 0.9:
                ahead.prepare()
            ahead.draw()
    assert ahead.history == plain.history
    assert ahead.n_draws < 0.8 * plain.n_draws


def test_nothing_is_forced_before_it_was_prepared_or_after_another_history(vocab: Vocab) -> None:
    stream = Stream(vocab, {"temperature": 0}, 1)
    assert stream.forced() == []
    while len(stream.forced()) < 4:
        stream.draw()
        stream.prepare()
    first, second, *rest = stream.forced()
    stream.history.append(first)
    assert stream.forced() == [second, *rest]
    stream.history[-1] = second + 1
    assert stream.forced() == []


def test_a_tick_never_has_more_forced_tokens_than_the_bound(vocab: Vocab) -> None:
    stream, numbers = Stream(vocab, {"temperature": 0}, 1), []
    while not stream.has_ended:
        stream.prepare()
        numbers.append(len(stream.forced()))
        stream.draw()
    assert max(numbers) == MAX_FORCED


def test_the_search_goes_on_where_its_bound_has_ended_it(vocab: Vocab) -> None:
    stream = Stream(vocab, {"temperature": 0}, 1)
    while len(stream.forced()) < MAX_FORCED:
        stream.draw()
        stream.prepare()
    stream.history += stream.forced()[:-1]
    stream.draw()
    assert stream.forced() == []
    stream.prepare()
    assert stream.forced() != []


def test_the_masks_along_a_draft_are_also_known_after_forced_tokens(vocab: Vocab) -> None:
    plain, ahead = Stream(vocab, {"temperature": 0}, 1), Stream(vocab, {"temperature": 0}, 1)
    while not plain.has_ended:
        plain.draw()
    while not ahead.forced():
        ahead.draw()
        ahead.prepare()
    ahead.history += ahead.forced()
    assert ahead.forced() == []
    n_history = len(ahead.history)
    ahead.sampler.prepare(ahead.history, len(PROMPT), n_history, plain.history[n_history : n_history + 4])
    for _ in range(5):
        ahead.draw()
    assert ahead.grammar.n_accepted == n_history - len(PROMPT), "a draw has computed a mask"
    assert ahead.history == plain.history[: n_history + 5]


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({"mirostat": 2}, {}),
        ({}, {"n_logprobs": 0}),
        ({}, {"n_logprobs": 2, "has_drawn_logprobs": True}),
        ({}, {"logit_bias": {5: 1.0}}),
    ],
    ids=["mirostat", "logprobs", "drawn logprobs", "logit bias"],
)
def test_a_job_that_needs_the_logits_of_each_token_has_no_forced_tokens(
    vocab: Vocab, params: dict[str, Any], options: dict[str, Any]
) -> None:
    stream = Stream(vocab, params, 3, **options)
    while not stream.has_ended:
        stream.prepare()
        assert stream.forced() == []
        stream.draw()
        assert stream.forced() == []


def test_neither_end_tokens_nor_masked_tokens_are_forced(vocab: Vocab) -> None:
    plain = Stream(vocab, {"temperature": 0}, 1)
    forced: list[int] = []
    while not plain.has_ended:
        plain.prepare()
        forced += plain.forced()[:1]
        plain.draw()
    assert plain.history[-1] in vocab.end_tokens
    assert not vocab.end_tokens & set(forced)
    assert len(list(constraint_of(vocab).allowed_along_forced(MAX_FORCED))) > 1
    assert len(list(constraint_of(vocab).allowed_along_forced(MAX_FORCED, never={forced[0]}))) == 1


def test_the_sets_along_forced_tokens_are_those_after_them(vocab: Vocab) -> None:
    constraint, other = constraint_of(vocab), constraint_of(vocab)
    generated: list[int] = []
    n_sets = 0
    while len(generated) < 60:
        constraint.accept(generated)
        sets = list(constraint.allowed_along_forced(5))
        assert len(sets) <= 6
        n_sets += len(sets)
        history = list(generated)
        for allowed in sets:
            other.accept(history)
            assert allowed.ids().tolist() == other.allowed_tokens().ids().tolist()
            history.append(int(allowed.ids()[0]))
        generated = history
    assert n_sets > 30
