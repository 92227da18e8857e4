"""The tokens that a grammar allows, and the draws from them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import llguidance
import numpy as np
import pytest
from tests.support.grammars import allows, constraint_of

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_request import JobParams, JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.core.job import Lease
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.generation.grammar.gbnf_to_lark import gbnf_to_lark
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.token_constraint import (
    MAX_COMPILED,
    SLICES,
    ConstraintTokenizer,
    TokenConstraint,
    _Tokens,
)
from llamaq.worker.generation.job_preparer import JobPreparer
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.settings import WorkerSettings


def generate(
    vocab: Vocab, constraint: TokenConstraint, params: SamplingDefaults, *, n_max: int = 200, seed: int = 1
) -> list[int]:
    """Sample tokens from random logits with a grammar, up to the first end token or `n_max` tokens."""
    noise = np.random.default_rng(seed)
    sampler = LogitSampler(params, seed=seed, grammar=constraint)
    history: list[int] = []
    while len(history) < n_max:
        logits = (noise.normal(size=vocab.n_tokens) * 4).astype(np.float32)
        token = sampler.sample(logits, history, 0)
        if token in vocab.end_tokens:
            break
        history.append(token)
    sampler.close()
    return history


SETTINGS = (
    SamplingDefaults(),
    SamplingDefaults(temperature=0),
    SamplingDefaults(top_k=0, top_p=1, min_p=0, temperature=3),
    SamplingDefaults(top_k=1000, typical_p=0.5),
)


@pytest.mark.parametrize("params", SETTINGS, ids=["default", "greedy", "all", "typical"])
def test_sampled_tokens_match_the_grammar(vocab: Vocab, sandbox: GrammarSandbox, params: Any) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["a", "bc"]}},
        },
        "required": ["age", "tags"],
    }
    tokenizer, compiled = ConstraintTokenizer(vocab), sandbox.check(JobParams(json_schema=schema)).text
    whole = 0
    for seed in range(16):
        tokens = generate(vocab, tokenizer.compile(compiled), params, seed=seed)
        if len(tokens) < 200:
            value = json.loads(vocab.decode(tokens))
            assert isinstance(value["age"], int)
            assert set(value["tags"]) <= {"a", "bc"}
            whole += 1
        if whole == 2:
            break
    assert whole


def test_jobs_with_the_same_grammar_advance_by_themselves(vocab: Vocab) -> None:
    tokenizer = ConstraintTokenizer(vocab)
    compiled = llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark('root ::= "a" | "b" "a"', "root"))
    first, second = tokenizer.compile(compiled), tokenizer.compile(compiled)
    a, b = vocab.encode("a")[1], vocab.encode("b")[1]
    first.accept([b])
    second.accept([a])
    assert (allows(first, a), allows(first, vocab.eos)) == (True, False)
    assert (allows(second, a), allows(second, vocab.eos)) == (False, True)
    assert [allows(tokenizer.compile(compiled), token) for token in (a, b, vocab.eos)] == [True, True, False]


def test_the_grammars_that_were_used_last_are_not_compiled_again(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, compiled = ConstraintTokenizer(vocab), []
    compile_once = tokenizer.compile_on_this_stack

    def count(grammar: str) -> TokenConstraint:
        compiled.append(grammar)
        return compile_once(grammar)

    monkeypatch.setattr(tokenizer, "compile_on_this_stack", count)
    first, *others = [
        llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(f'root ::= "{number}"', "root"))
        for number in range(MAX_COMPILED + 1)
    ]
    for grammar in (first, first, *others[:-1], first, others[-1], first, others[0]):
        tokenizer.compile(grammar)
    assert compiled == [first, *others, others[0]]


def test_a_grammar_that_does_not_compile_is_tried_once(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ConstraintTokenizer(vocab)
    compiled = Mock(side_effect=tokenizer.compile_on_this_stack)
    monkeypatch.setattr(tokenizer, "compile_on_this_stack", compiled)
    for _ in range(2):
        with pytest.raises(JobRejected, match="regex parse error"):
            tokenizer.compile(llguidance.LLMatcher.grammar_from_regex("("))
    assert compiled.call_count == 1


def test_a_compilation_waits_only_for_that_of_the_same_grammar(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ConstraintTokenizer(vocab)
    compile_once, has_begun, may_end = tokenizer.compile_on_this_stack, threading.Event(), threading.Event()
    slow, quick = (llguidance.LLMatcher.grammar_from_regex(text) for text in ("a+", "b+"))

    def compile_slowly(grammar: str) -> TokenConstraint:
        if grammar == slow:
            has_begun.set()
            assert may_end.wait(timeout=60)
        return compile_once(grammar)

    compiled = Mock(side_effect=compile_slowly)
    monkeypatch.setattr(tokenizer, "compile_on_this_stack", compiled)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(tokenizer.compile, slow) for _ in range(2)]
        assert has_begun.wait(timeout=60)
        assert tokenizer.compile(quick).allowed_tokens()
        assert not any(each.done() for each in waiting)
        may_end.set()
        assert all(each.result().allowed_tokens() for each in waiting)
    assert [call.args for call in compiled.call_args_list] == [(slow,), (quick,)]


def test_an_end_token_is_allowed_only_where_the_grammar_can_end(vocab: Vocab) -> None:
    grammar = constraint_of(vocab, 'root ::= "ab"')
    a, b = vocab.encode("a")[1], vocab.encode("b")[1]
    ends = [allows(grammar, vocab.eos)]
    for n in range(2):
        grammar.accept([a, b][: n + 1])
        ends.append(allows(grammar, vocab.eos))
    assert ends == [False, False, True]
    assert not allows(grammar, a)


def test_a_grammar_that_allows_only_the_end_draws_an_end_token(vocab: Vocab) -> None:
    assert generate(vocab, constraint_of(vocab, 'root ::= ""'), SamplingDefaults()) == []


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("top_k", [0, 40])
def test_a_complete_grammar_ends_although_end_tokens_are_masked(vocab: Vocab, temperature: float, top_k: int) -> None:
    params = SamplingDefaults(temperature=temperature, top_k=top_k)
    grammar = constraint_of(vocab, 'root ::= "a"{5,5}')
    sampler = LogitSampler(params, seed=1, grammar=grammar, masked_tokens=vocab.end_tokens)
    history: list[int] = []
    while not history or history[-1] not in vocab.end_tokens:
        history.append(sampler.sample(np.zeros(vocab.n_tokens, np.float32), history, 0))
    assert vocab.decode(history[:-1]) == "aaaaa"


def test_a_grammar_that_is_not_complete_and_has_no_token_left_fails_the_job(vocab: Vocab) -> None:
    letters = [token for token in range(vocab.n_tokens) if b"a" in vocab.piece(token)]
    grammar = constraint_of(vocab, 'root ::= "aa"')
    sampler = LogitSampler(SamplingDefaults(), seed=1, grammar=grammar, masked_tokens=[*letters, *vocab.end_tokens])
    with pytest.raises(JobRejected) as refused:
        sampler.sample(np.zeros(vocab.n_tokens, np.float32), [], 0)
    assert refused.value.code == ErrorCode.GRAMMAR_EXHAUSTED


def test_a_token_that_the_grammar_does_not_allow_is_never_accepted(vocab: Vocab) -> None:
    grammar = constraint_of(vocab, 'root ::= "ab"')
    with pytest.raises(JobRejected) as refused:
        grammar.accept(vocab.encode("b")[1:])
    assert refused.value.code == ErrorCode.GRAMMAR_EXHAUSTED


def test_the_tokens_of_an_earlier_attempt_are_accepted_before_the_next_draw(vocab: Vocab) -> None:
    text, params = 'root ::= "(" [a-z ]+ ")"', SamplingDefaults()
    logits = np.random.default_rng(1).normal(size=vocab.n_tokens).astype(np.float32)
    history: list[int] = []
    first = LogitSampler(params, seed=3, grammar=constraint_of(vocab, text))
    for _ in range(6):
        history.append(first.sample(logits, history, 0))
    resumed = LogitSampler(params, seed=3, grammar=constraint_of(vocab, text))
    assert resumed.sample(logits, history[:5], 0) == history[5]


def test_the_tokens_of_an_earlier_attempt_are_accepted_one_by_one_when_the_job_is_prepared(
    vocab: Vocab, sandbox: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine thread does not wait for them, and each may take the whole time of a step."""
    steps: list[int] = []
    accept = TokenConstraint.accept

    def record(constraint: TokenConstraint, tokens: Sequence[int], n_prompt: int = 0, n_history: int = 0) -> None:
        steps.append(n_history)
        accept(constraint, tokens, n_prompt, n_history)

    monkeypatch.setattr(TokenConstraint, "accept", record)
    defaults = WorkerSettings().job_defaults
    preparer = JobPreparer(vocab, sandbox, defaults, context_limit=512, max_request_bytes=10_000)
    payload = codec.encode_request(JobRequest(prompt="x", seed=1, regex="[a-c]+"), 10_000)
    lease = Lease("q.0." + "0" * 32, 0, Keys().jobs("q", 0, Priority.INTERACTIVE), "1-0", 2)
    (a,), (b,), (z,) = (vocab.encode_part(letter) for letter in "abz")
    preparer.prepare(payload, lease, TokenSpan(0, (a, b, a), 0, "aba"), JobTimes(0.0)).job.close()
    assert steps == [1, 2, 3]
    with pytest.raises(JobRejected) as refused:
        preparer.prepare(payload, lease, TokenSpan(0, (a, z), 0, "az"), JobTimes(0.0))
    assert refused.value.code == ErrorCode.GRAMMAR_EXHAUSTED


def test_a_draw_from_tokens_that_the_grammar_allows_is_the_same_without_the_grammar(vocab: Vocab) -> None:
    logits = np.random.default_rng(1).normal(size=vocab.n_tokens).astype(np.float32)
    anything = constraint_of(vocab, "root ::= .*")
    allowed = anything.allowed_tokens()
    not_allowed = [token for token in range(vocab.n_tokens) if token not in allowed]
    free = LogitSampler(SamplingDefaults(), seed=3, masked_tokens=not_allowed).sample(logits.copy(), [], 0)
    assert LogitSampler(SamplingDefaults(), seed=3, grammar=anything).sample(logits, [], 0) == free


def test_draws_come_from_the_allowed_tokens_with_the_largest_logits(vocab: Vocab) -> None:
    logits = np.random.default_rng(2).normal(size=vocab.n_tokens).astype(np.float32)
    grammar = constraint_of(vocab, "root ::= [0-9]")
    allowed = grammar.allowed_tokens().ids().tolist()
    best = sorted(allowed, key=lambda token: -logits[token])[:2]
    params = SamplingDefaults(top_k=2, top_p=1, min_p=0)
    drawn = {LogitSampler(params, seed=n, grammar=grammar).sample(logits, [], 0) for n in range(40)}
    assert drawn == set(best)


def test_a_sampler_and_its_grammar_may_be_closed_twice(vocab: Vocab) -> None:
    sampler = LogitSampler(SamplingDefaults(), seed=1, grammar=constraint_of(vocab, 'root ::= "a"'))
    sampler.close()
    sampler.close()


def test_control_tokens_are_never_allowed_as_text(vocab: Vocab) -> None:
    allowed = constraint_of(vocab, "root ::= .+").allowed_tokens()
    assert not any(token in allowed for token in range(vocab.n_tokens) if not vocab.piece(token))


def test_a_step_that_takes_too_long_rejects_the_job(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = constraint_of(vocab, "root ::= .*")
    monkeypatch.setattr("llamaq.worker.generation.grammar.token_constraint.MAX_STEP_S", 0.0)
    with pytest.raises(JobRejected, match="ambiguous"):
        grammar.accept([vocab.encode("a")[1]] * 100)


def test_a_grammar_that_exceeds_the_limits_of_a_step_rejects_the_job(vocab: Vocab) -> None:
    doubled = "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60))
    for lark in (f'start: r0\n{doubled}\nr60: "y"', "start: e*\ne: e* /[a-z]/ e*"):
        compiled = llguidance.LLMatcher.grammar_from_lark(lark)
        with pytest.raises(JobRejected, match="too complex"):
            generate(vocab, ConstraintTokenizer(vocab).compile(compiled), SamplingDefaults())


LONG_COUNTS = llguidance.LLMatcher.grammar_from_regex(r"x[0-9]{1,50}|y(\w{0,999}){100}")
"""Some texts after y exceed a limit of the lexer."""


def bytes_of(vocab: Vocab, text: str) -> list[int]:
    """Return a text in tokens of one byte."""
    pieces = {vocab.piece(token): token for token in range(vocab.n_tokens)}
    return [pieces[bytes([byte])] for byte in text.encode()]


def test_a_text_that_exceeds_a_limit_of_the_lexer_fails_its_own_job_alone(vocab: Vocab) -> None:
    tokenizer = ConstraintTokenizer(vocab)
    number, word = bytes_of(vocab, "x12345678"), bytes_of(vocab, "y" + "abcdefgh" * 20)
    prompt = [7, 8]
    beside = [tokenizer.compile(LONG_COUNTS) for _ in range(2)]
    for one in beside:
        one.accept([*prompt, *number[:4]], len(prompt))
    beside[1].allowed_tokens()
    failing = tokenizer.compile(LONG_COUNTS)
    with pytest.raises(JobRejected, match=r"too complex.* write smaller counted repetitions") as refused:
        failing.resume(word)
    assert refused.value.code == ErrorCode.INVALID_GRAMMAR
    assert allows(beside[0], number[4])
    for one in (*beside, tokenizer.compile(LONG_COUNTS)):
        one.accept([*prompt, *number], len(prompt))
        assert one.n_accepted == len(number)
        assert allows(one, vocab.eos)
        with pytest.raises(JobRejected, match="does not allow"):
            one.accept([*prompt, *number, *word], len(prompt))


@pytest.mark.parametrize("limit_s", [0.0, 0.25])
def test_a_constraint_is_compiled_again_only_if_this_takes_little_time(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    monkeypatch.setattr("llamaq.worker.generation.grammar.token_constraint.MAX_RESTART_S", limit_s)
    tokenizer = ConstraintTokenizer(vocab)
    number, word = bytes_of(vocab, "x12345678"), bytes_of(vocab, "y" + "abcdefgh" * 20)
    beside = tokenizer.compile(LONG_COUNTS)
    with pytest.raises(JobRejected, match="too complex"):
        tokenizer.compile(LONG_COUNTS).resume(word)
    if limit_s:
        beside.resume(number)
    else:
        with pytest.raises(JobRejected, match=r"too complex.* write smaller counted repetitions"):
            beside.resume(number)


def test_all_copies_together_take_little_time_to_be_compiled_again(vocab: Vocab) -> None:
    tokenizer = ConstraintTokenizer(vocab)
    number, word = bytes_of(vocab, "x12345678"), bytes_of(vocab, "y" + "abcdefgh" * 20)
    beside = [tokenizer.compile(LONG_COUNTS) for _ in range(3)]
    lexer = beside[0].lexer
    with pytest.raises(JobRejected, match="too complex"):
        tokenizer.compile(LONG_COUNTS).resume(word)
    whole_s = lexer.restart_s_left
    beside[0].resume(number)
    assert lexer.restart_s_left < whole_s - beside[0].lexer.compilation_s
    lexer.restart_s_left = lexer.compilation_s / 2
    for one in beside[1:]:
        with pytest.raises(JobRejected, match=r"too complex.* write smaller counted repetitions"):
            one.resume(number)
    assert lexer.restart_s_left == lexer.compilation_s / 2, "a copy was compiled that could not be used"


def test_the_vocabulary_is_not_copied_for_llguidance(vocab: Vocab) -> None:
    assert _Tokens(vocab).tokens is vocab.pieces


def test_the_kinds_of_tokens_are_kinds_that_llguidance_knows() -> None:
    assert set(SLICES) < set(llguidance.LLTokenizer.general_slices())
