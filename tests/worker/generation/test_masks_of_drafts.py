"""The masks of a grammar along a draft are computed before the draws, and change no draw."""

from __future__ import annotations

from random import Random

import llguidance
import numpy as np
import pytest

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar.gbnf_to_lark import gbnf_to_lark
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer, TokenConstraint
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler

GBNF = 'root ::= "[" item ("," item){3,30} "]"\nitem ::= [0-9]+ | "true" | "\\"" [a-z ]* "\\""'
PROMPT = [1, 2, 3]
N_TICKS = 60


def constraint_of(vocab: Vocab, gbnf: str) -> TokenConstraint:
    return ConstraintTokenizer(vocab).compile(llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(gbnf, "root")))


class Stream:
    """A job whose draws depend on the history only, like those of a model."""

    def __init__(self, vocab: Vocab, params: SamplingDefaults, seed: int) -> None:
        self._n_vocab = vocab.n_tokens
        self._seed = seed
        self.grammar = constraint_of(vocab, GBNF)
        self.sampler = LogitSampler(params, seed=seed, grammar=self.grammar, masked_tokens=vocab.end_tokens)
        self.history = list(PROMPT)

    def draw(self) -> int:
        """Draw the next token, and append it."""
        logits = np.random.default_rng([self._seed, len(self.history), self.history[-1]]).normal(0, 2, self._n_vocab)
        self.history.append(self.sampler.sample(logits.astype(np.float32), self.history, len(PROMPT)))
        return self.history[-1]

    def tick(self, draft: list[int]) -> None:
        """Draw while the drawn token is the next one of the draft, and once more."""
        for drafted in (*draft, None):
            if self.draw() != drafted:
                break


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("seed", range(6))
def test_masks_along_a_draft_change_no_draw(vocab: Vocab, temperature: float, seed: int) -> None:
    random, params = Random(seed), SamplingDefaults(temperature=temperature)
    plain, prepared = Stream(vocab, params, seed), Stream(vocab, params, seed)
    while len(plain.history) < len(PROMPT) + N_TICKS and plain.history[-1] not in vocab.end_tokens:
        plain.draw()
    n_ahead = 0
    while len(prepared.history) < len(plain.history):
        n_history = len(prepared.history)
        draft = plain.history[n_history : n_history + random.randrange(8)]
        if draft and random.random() < 0.5:  # a token that may be allowed
            draft[random.randrange(len(draft))] = random.randrange(vocab.n_tokens)
        when = random.choice(["first", "late", "never"])
        if when == "first":
            prepared.sampler.prepare(prepared.history, len(PROMPT), n_history, tuple(draft))
            n_ahead += len(draft)
        prepared.tick(draft)
        if when == "late":  # the other thread had no time before
            prepared.sampler.prepare(prepared.history, len(PROMPT), n_history, tuple(draft))
    assert prepared.history[: len(plain.history)] == plain.history
    assert n_ahead > 0


def test_the_tokens_along_a_draft_are_those_after_its_tokens(vocab: Vocab) -> None:
    constraint = constraint_of(vocab, GBNF)
    draft = [vocab.encode(text)[-1] for text in ("[", "1", "2", ",")]
    found = list(constraint.allowed_along([*draft, vocab.encode("]")[-1], draft[0]]))
    assert len(found) == len(draft) + 1, "three items are missing before the end"
    assert constraint.n_accepted == 0
    for n_tokens, allowed in enumerate(found):
        constraint.accept(draft[:n_tokens])
        assert allowed.ids().tolist() == constraint.allowed_tokens().ids().tolist()


def test_a_draft_after_which_the_grammar_is_too_complex_is_no_error_of_the_job(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = constraint_of(vocab, GBNF)
    steps = iter([1.0, 0.0, 0.0, 5.0])  # seconds of processor time at the beginning and the end of two steps
    constraint.accept([vocab.encode("[")[-1]])
    constraint.allowed_tokens()
    monkeypatch.setattr("time.thread_time", lambda: next(steps, 9.0))
    assert len(list(constraint.allowed_along([vocab.encode("1")[-1]]))) == 1
    assert len(constraint.allowed_tokens()) > 0
