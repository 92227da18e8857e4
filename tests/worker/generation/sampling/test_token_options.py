"""The draws of a job with `min_tokens`, `stop_token_ids` or `allowed_token_ids`."""

from __future__ import annotations

from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.grammars import constraint_of, token_of
from tests.support.llama_samplers import random_logits

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar.gbnf_to_lark import gbnf_to_lark
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer
from llamaq.worker.generation.grammar.token_set import TokenSet
from llamaq.worker.generation.sampling.bad_words import BadWords
from llamaq.worker.generation.sampling.candidates import Logits
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.generation.sampling.reasoning_budget import ReasoningBudget

N_VOCAB = 500
ENDS = frozenset({3, 4})
PROMPT = [7, 8, 9]
MIN_TOKENS = 3
CHAINS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repeat_penalty": 1.3},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 40, "repeat_penalty": 1.3},
    {"temperature": 1, "top_k": 0},
    {"temperature": 1, "top_k": 0, "top_n_sigma": 1.0},
    {"temperature": 1, "mirostat": 2},
    {"temperature": 1, "dry_multiplier": 0.8},
]
each_chain = pytest.mark.parametrize("params", CHAINS, ids=repr)


def new_sampler(params: dict[str, Any], **arguments: Any) -> LogitSampler:
    options: dict[str, Any] = {"seed": 1, "end_tokens": ENDS} | arguments
    return LogitSampler(SamplingDefaults(**params), **options)


def logits_with_ends(seed: int = 1) -> Logits:
    """Return logits among which those of the end tokens are the largest by far."""
    logits = random_logits(N_VOCAB, seed)
    logits[list(ENDS)] = 60
    return logits


def draw(sampler: LogitSampler, logits: Logits, n_generated: int) -> int:
    """Draw the next token in the way in which the engine does."""
    history = [*PROMPT, *range(20, 20 + n_generated)]
    best = None if sampler.checks_logits else int(logits.argmax())
    return sampler.sample(logits.copy(), history, len(PROMPT), best)


# ---- min_tokens


@each_chain
def test_end_tokens_are_drawn_only_after_the_minimum_of_tokens(params: dict[str, Any]) -> None:
    sampler = new_sampler(params, min_tokens=MIN_TOKENS)
    is_end = [draw(sampler, logits_with_ends(n), n) in ENDS for n in range(MIN_TOKENS + 2)]
    assert is_end == [False] * MIN_TOKENS + [True, True]


@each_chain
def test_the_minimum_counts_the_tokens_of_earlier_attempts(params: dict[str, Any]) -> None:
    draws = [0.5] * MIN_TOKENS
    assert draw(new_sampler(params, min_tokens=MIN_TOKENS, draws=draws), logits_with_ends(), MIN_TOKENS) in ENDS
    assert draw(new_sampler(params, min_tokens=MIN_TOKENS, draws=draws[1:]), logits_with_ends(), 2) not in ENDS


@pytest.mark.parametrize("params", CHAINS[:4], ids=repr)
@given(seed=st.integers(0, 10**6), n_generated=st.integers(0, 6))
def test_the_largest_logits_give_the_same_draw_before_and_after_the_minimum(
    params: dict[str, Any], seed: int, n_generated: int
) -> None:
    arguments: dict[str, Any] = {"seed": seed, "min_tokens": MIN_TOKENS, "masked_tokens": [5]}
    all_logits, few_logits = (new_sampler(params, **arguments) for _ in range(2))
    logits = logits_with_ends(seed)
    assert few_logits.n_largest is not None
    tokens = np.argsort(-logits)[: few_logits.n_largest].astype(np.int32)
    history = [*PROMPT, *range(20, 20 + n_generated)]
    token = few_logits.sample_largest(tokens, logits[tokens], history, len(PROMPT))
    assert token == draw(all_logits, logits, n_generated)
    assert (token in ENDS) == (n_generated >= MIN_TOKENS)


def test_a_draw_from_the_logits_alone_masks_the_end_tokens_before_the_minimum() -> None:
    sampler = new_sampler({"temperature": 0.8}, min_tokens=MIN_TOKENS, masked_tokens=[9])
    masked = [found.masked for n in (0, 2, 3, 4) if (found := sampler.row_draw(n)) is not None]
    assert masked == [(3, 4, 9), (3, 4, 9), (9,), (9,)]


def test_a_best_token_that_is_an_end_token_is_not_taken_before_the_minimum() -> None:
    sampler = new_sampler({"temperature": 0}, min_tokens=MIN_TOKENS)
    assert sampler.sample(logits_with_ends(), PROMPT, len(PROMPT), drawn=3) not in ENDS
    assert sampler.sample(logits_with_ends(), [*PROMPT, 1, 1, 1], len(PROMPT), drawn=3) == 3


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "top_k": 0}], ids=repr)
def test_a_grammar_that_allows_only_the_end_ends_before_the_minimum(vocab: Vocab, params: dict[str, Any]) -> None:
    """The grammar ends after `aa`. Without another token, the end token is drawn although it is masked."""
    arguments: dict[str, Any] = {"end_tokens": vocab.end_tokens, "min_tokens": 10}
    sampler = new_sampler(params, grammar=constraint_of(vocab, 'root ::= "a"{2,2}'), **arguments)
    generated: list[int] = []
    while not generated or generated[-1] not in vocab.end_tokens:
        generated.append(sampler.sample(np.zeros(vocab.n_tokens, np.float32), generated, 0))
    assert vocab.decode(generated[:-1]) == "aa"


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1}], ids=repr)
def test_a_grammar_continues_to_the_minimum_where_it_may_also_end(vocab: Vocab, params: dict[str, Any]) -> None:
    logits = np.zeros(vocab.n_tokens, np.float32)
    logits[list(vocab.end_tokens)] = 50
    arguments: dict[str, Any] = {"end_tokens": vocab.end_tokens, "min_tokens": 4}
    sampler = new_sampler(params, grammar=constraint_of(vocab, 'root ::= "a"*'), **arguments)
    generated: list[int] = []
    while not generated or generated[-1] not in vocab.end_tokens:
        generated.append(sampler.sample(logits.copy(), generated, 0))
    assert len(generated) == 5


@pytest.mark.parametrize("min_tokens", [0, 10])
def test_a_token_that_ends_the_job_is_not_forced_by_a_grammar(vocab: Vocab, min_tokens: int) -> None:
    """It is drawn in a tick of its own, because no KV cell is computed for the end of a job."""
    a, b = token_of(vocab, "a"), token_of(vocab, "b")
    arguments: dict[str, Any] = {"grammar": constraint_of(vocab, f"root ::= <[{a}]> <[{b}]> <[{a}]>")}
    sampler = new_sampler({"temperature": 0}, end_tokens=frozenset({b}), min_tokens=min_tokens, **arguments)
    sampler.prepare([0], 1, 1, ())
    assert list(sampler.forced_tokens([0], 1)) == [a]


def test_a_grammar_that_allows_only_a_stop_token_ends_the_job_before_the_minimum(vocab: Vocab) -> None:
    a, b = token_of(vocab, "a"), token_of(vocab, "b")
    grammar = constraint_of(vocab, 'root ::= "a" "b" "c"')
    several = [token for token in range(vocab.n_tokens) if len(vocab.piece(token)) > 1]
    sampler = new_sampler(
        {"temperature": 0}, grammar=grammar, end_tokens=frozenset({b}), min_tokens=10, masked_tokens=several
    )
    assert sampler.sample(np.zeros(vocab.n_tokens, np.float32), [0], 1) == a
    assert sampler.sample(np.zeros(vocab.n_tokens, np.float32), [0, a], 1) == b


def test_the_end_of_the_reasoning_is_not_forced_before_the_minimum_if_it_ends_the_job() -> None:
    def drawn(n_generated: int, min_tokens: int, end_tokens: frozenset[int]) -> int:
        budget = ReasoningBudget(1, b"<think>", b"</think>", [9], lambda token: bytes([token]), b"<think>")
        sampler = new_sampler({"temperature": 0}, reasoning=budget, min_tokens=min_tokens, end_tokens=end_tokens)
        return draw(sampler, random_logits(N_VOCAB, 1), n_generated)

    stop = frozenset({9})
    assert [drawn(n, 0, stop) == 9 for n in (0, 1)] == [False, True]
    assert [drawn(n, 3, stop) == 9 for n in (0, 1, 2, 3)] == [False, False, False, True]
    assert drawn(1, 3, ENDS) == 9  # another closing tag is forced at once


# ---- bad_words


def test_a_bad_word_is_known_with_and_without_a_space_before_it() -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [len(encoded)]

    words = BadWords.encode([" foo", "bar", "\n"], encode)
    assert encoded == ["foo", " foo", "bar", " bar", "\n", " \n"]
    assert words.single_tokens == {1, 2, 3, 4, 5, 6}


def test_the_last_token_of_a_bad_word_is_masked_after_the_others() -> None:
    words = BadWords([(5,), (1, 2), (9, 1, 3), (7, 7, 4), (1, 5)])
    assert words.single_tokens == {5}
    assert words.last_tokens == {2, 3, 4}
    assert words.completed_after([1], 1) == []  # the prompt is no part of the output
    assert words.completed_after([8, 1], 1) == [2]
    assert words.completed_after([9, 1], 1) == [2]
    assert words.completed_after([8, 9, 1], 1) == [2, 3]
    assert words.completed_after([8, 7], 1) == []
    assert words.completed_after([8, 7, 7, 7], 1) == [4]


@each_chain
def test_no_bad_word_is_drawn(params: dict[str, Any]) -> None:
    """The tokens 21, 60 and 61 are the most probable ones, and 60 and 61 are bad after 20 and 21."""
    logits = random_logits(N_VOCAB, 1)
    logits[[60, 61, 70]] = 50, 49, 48
    sampler = new_sampler(params, bad_words=BadWords([(70,), (20, 60), (20, 21, 61)]), draws=[0.5] * 2)
    free = new_sampler(params, draws=[0.5] * 2)
    for n, banned in ((0, {70}), (1, {70, 60}), (2, {70, 61}), (3, {70})):
        drawn = draw(sampler, logits, n)  # the history has the tokens 20, 21, 22
        assert drawn not in banned
        assert draw(free, logits, n) in {60, 61, 70}


@pytest.mark.parametrize("params", CHAINS[:4], ids=repr)
@given(seed=st.integers(0, 10**6), n_generated=st.integers(0, 3))
def test_the_largest_logits_give_the_same_draw_with_bad_words(
    params: dict[str, Any], seed: int, n_generated: int
) -> None:
    logits = random_logits(N_VOCAB, seed)
    likely = np.argsort(-logits)[:50].tolist()
    words = BadWords([(20, token) for token in likely[:30]] + [(20, 21, token) for token in likely[20:]])
    all_logits, few_logits = (new_sampler(params, seed=seed, bad_words=words) for _ in range(2))
    assert few_logits.n_largest is not None
    assert few_logits.row_draw(0) is None
    tokens = np.argsort(-logits)[: few_logits.n_largest].astype(np.int32)
    history = [*PROMPT, *range(20, 20 + n_generated)]
    assert few_logits.sample_largest(tokens, logits[tokens], history, len(PROMPT)) == draw(
        all_logits, logits, n_generated
    )


def test_bad_words_of_one_token_cost_no_draw_its_shortcut() -> None:
    sampler = new_sampler({"temperature": 0.8}, bad_words=BadWords([(70,)]))
    assert (found := sampler.row_draw(0)) is not None
    assert found.masked == (70,)


@each_chain
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_of_a_bad_word_that_is_no_number_fails_the_job(params: dict[str, Any], value: float) -> None:
    logits = random_logits(N_VOCAB, 1)
    logits[60] = value
    sampler = new_sampler(params, bad_words=BadWords([(20, 60)]))
    if sampler.checks_logits:  # otherwise the engine checks
        with pytest.raises(JobRejected) as refused:
            draw(sampler, logits, 1)
        assert refused.value.code == ErrorCode.DECODE_FAILED


def test_the_last_token_of_a_bad_word_is_not_forced_by_a_grammar(vocab: Vocab) -> None:
    a, b = token_of(vocab, "a"), token_of(vocab, "b")
    grammar = constraint_of(vocab, f"root ::= <[{a}]> <[{b}]> <[{a}]>")
    sampler = new_sampler({"temperature": 0}, grammar=grammar, bad_words=BadWords([(a, b)]))
    sampler.prepare([0], 1, 1, ())
    assert list(sampler.forced_tokens([0], 1)) == [a]
    logits = np.zeros(vocab.n_tokens, np.float32)
    assert sampler.sample(logits.copy(), [0], 1) == a
    with pytest.raises(JobRejected, match="no token") as refused:
        sampler.sample(logits.copy(), [0, a], 1)
    assert refused.value.code == ErrorCode.GRAMMAR_EXHAUSTED


# ---- allowed_token_ids


@each_chain
@pytest.mark.parametrize("n_allowed", [1, 5, 300])
def test_only_allowed_tokens_are_drawn(params: dict[str, Any], n_allowed: int) -> None:
    allowed = np.random.default_rng(n_allowed).permutation(np.arange(10, N_VOCAB))[:n_allowed].tolist()
    sampler = new_sampler(params, only=TokenSet.of(allowed, N_VOCAB))
    logits = [random_logits(N_VOCAB, seed) for seed in range(30)]
    assert {draw(sampler, each, n) for n, each in enumerate(logits)} <= set(allowed)
    assert sampler.n_largest is None
    assert sampler.row_draw(0) is None


@pytest.mark.parametrize("params", CHAINS[:3], ids=repr)
def test_a_list_of_all_tokens_changes_no_draw(params: dict[str, Any]) -> None:
    plain, listed = new_sampler(params), new_sampler(params, only=TokenSet.of(range(N_VOCAB), N_VOCAB))
    for n in range(20):
        logits = random_logits(N_VOCAB, n)
        assert draw(plain, logits, n) == draw(listed, logits, n)


@pytest.mark.parametrize("params", CHAINS[:3], ids=repr)
def test_a_list_whose_tokens_are_all_masked_fails_the_job(params: dict[str, Any]) -> None:
    sampler = new_sampler(params, only=TokenSet.of(ENDS, N_VOCAB), min_tokens=MIN_TOKENS)
    with pytest.raises(JobRejected, match="allowed_token_ids") as refused:
        draw(sampler, logits_with_ends(), 0)
    assert refused.value.code == ErrorCode.GRAMMAR_EXHAUSTED
    assert draw(sampler, logits_with_ends(), MIN_TOKENS) in ENDS


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "top_k": 0}], ids=repr)
def test_a_grammar_and_a_list_allow_only_what_both_allow(vocab: Vocab, params: dict[str, Any]) -> None:
    """The end token is masked, as the list does not name it, but drawn where no other token is left."""
    letters = {bytes([letter]) for letter in b"bcd"}
    allowed = {token for token in range(vocab.n_tokens) if vocab.piece(token) in letters} | vocab.end_tokens
    sampler = new_sampler(
        params,
        grammar=constraint_of(vocab, "root ::= [ab]{3,3}"),
        only=TokenSet.of(allowed, vocab.n_tokens),
        masked_tokens=vocab.end_tokens,
        end_tokens=vocab.end_tokens,
    )
    generated: list[int] = []
    while not generated or generated[-1] not in vocab.end_tokens:
        generated.append(sampler.sample(np.zeros(vocab.n_tokens, np.float32), generated, 0))
    assert vocab.decode(generated[:-1]) == "bbb"


def test_a_grammar_that_allows_none_of_the_listed_tokens_fails_the_job(vocab: Vocab) -> None:
    only = TokenSet.of(vocab.end_tokens | {vocab.encode("x")[-1]}, vocab.n_tokens)
    sampler = new_sampler({"temperature": 0}, grammar=constraint_of(vocab, 'root ::= "ab"'), only=only)
    with pytest.raises(JobRejected, match="allowed_token_ids") as refused:
        sampler.sample(np.zeros(vocab.n_tokens, np.float32), [0], 1)
    assert refused.value.code == ErrorCode.GRAMMAR_EXHAUSTED


def test_tokens_that_a_grammar_and_a_list_force_together_are_found(vocab: Vocab) -> None:
    """The list of one job does not reach the next job with the same grammar, which is compiled once."""
    tokenizer, a = ConstraintTokenizer(vocab), token_of(vocab, "a")
    compiled = llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark("root ::= [ab]{9,9}", "root"))
    for only, forced in ((TokenSet.of({a}, vocab.n_tokens), {a}), (None, set())):
        sampler = new_sampler({"temperature": 0}, grammar=tokenizer.compile(compiled), only=only)
        sampler.prepare([0], 1, 1, ())
        assert set(sampler.forced_tokens([0], 1)) == forced


def test_the_end_of_the_reasoning_is_not_forced_if_the_list_does_not_name_it() -> None:
    for only, expected in (({5, 6}, False), ({5, 9}, True)):
        budget = ReasoningBudget(0, b"<think>", b"</think>", [9], lambda token: bytes([token]), b"<think>")
        logits = random_logits(N_VOCAB, 1)
        logits[5] = 50
        sampler = new_sampler({"temperature": 0}, reasoning=budget, only=TokenSet.of(only, N_VOCAB))
        assert (draw(sampler, logits, 0) == 9) is expected
