from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from tests.support.redis_servers import wait_until

from llamaq.common.errors import EngineError, ErrorCode, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_request import JobParams, JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.core.job import Lease
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.generation.grammar import sandbox as sandbox_module
from llamaq.worker.generation.grammar.gbnf_to_lark import MAX_NESTING, gbnf_to_lark
from llamaq.worker.generation.grammar.grammar_vocabulary import CopiedVocabulary, pack_vocabulary
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


@pytest.fixture(scope="module")
def sandbox(vocab: Vocab) -> Iterator[GrammarSandbox]:
    sandbox = GrammarSandbox(vocab, timeout_s=3)
    yield sandbox
    sandbox.close()


def constraint_of(vocab: Vocab, gbnf: str, root: str = "root") -> TokenConstraint:
    """Compile a grammar in GBNF without the sandbox."""
    return ConstraintTokenizer(vocab).compile(llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(gbnf, root)))


def allows(constraint: TokenConstraint, token: int | None) -> bool:
    return (token or 0) in constraint.allowed_tokens()


def is_whole_output(vocab: Vocab, compiled: str, text: str) -> bool:
    """Return whether a compiled grammar allows the text, byte by byte, and an end token after it."""
    pieces = {vocab.piece(token): token for token in range(vocab.n_tokens)}
    constraint = ConstraintTokenizer(vocab).compile(compiled)
    try:
        constraint.accept([pieces[bytes([byte])] for byte in text.encode()])
    except JobRejected:
        return False
    return allows(constraint, vocab.eos)


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
    tokenizer, compiled = ConstraintTokenizer(vocab), sandbox.compile(JobParams(json_schema=schema))
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


NESTED = "(" * (MAX_NESTING + 1) + '"a"' + ")" * (MAX_NESTING + 1)
BAD_GRAMMARS = {
    "empty": (" ", "no rules"),
    "comment": ("# nothing", "no rules"),
    "no root": ('a ::= "x"', "no rule 'root'"),
    "undefined rule": ('root ::= "x" nothing', "'nothing', which is not defined"),
    "second rule": ('root ::= "x"\nroot ::= "y"', "a second rule 'root' at line 2, column 1"),
    "syntax": ('root ::= "a"\n  b := "c"', "a syntax error at line 2, column 5"),
    "unterminated": ('root ::= "abc', "a syntax error at line 1, column 10"),
    "open group": ('root ::= ("a"', "not closed"),
    "closed group": ('root ::= "a")', "not opened"),
    "repetition of nothing": ("root ::= *", "a repetition of nothing"),
    "range": ("root ::= [z-a]", "descending order"),
    "bad escape": (r'root ::= "\q"', "unknown escape sequence at line 1, column 10"),
    "nested": (f"root ::= {NESTED}", "nest deeper"),
    "nested 20,000 deep": ("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "nest deeper"),
    "no character": ("root ::= [^\\x00-\\U0010FFFF]", "no character matches"),
    "not Unicode": ('root ::= "\\U00FFFFFF"', "not a character of Unicode"),
    "no token": ('root ::= root "x"', "cannot be used"),
}


@pytest.mark.parametrize(("grammar", "reason"), BAD_GRAMMARS.values(), ids=BAD_GRAMMARS)
def test_a_bad_grammar_is_refused_with_a_reason(sandbox: GrammarSandbox, grammar: str, reason: str) -> None:
    with pytest.raises(JobRejected) as refused:
        sandbox.compile(JobParams(grammar=grammar))
    assert refused.value.code == ErrorCode.INVALID_GRAMMAR
    assert reason in refused.value.message


GOOD_GRAMMARS = {
    "empty output": 'root ::= ""',
    "right recursion": 'root ::= "a" root | "b"',
    "nested repetition": 'root ::= (("a"*)* "x"?)* "b"',
    "many repetitions": 'root ::= ("x"{40}){40}',
    "brackets in literals": 'root ::= "<a>((((" [(<] # (((\n',
    "unicode": 'root ::= [äöü]+ "€" "\\u00e9"',
    "escapes": 'root ::= "\\"\\\\" [\\]\\[a-z] ("b")?',
    "other rules first": 'a ::= "x"\nroot ::= a |\n  "y"',
    "left recursion": 'root ::= root "x" | "y"',
    "hidden left recursion": 'root ::= [a-z]{900} c\nc ::= a c "x" | "y"\na ::= b\nb ::= "z"?',
    "indirect left recursion": 'root ::= a\na ::= (b | "x") "y"\nb ::= "z"* root',
    "keywords of Lark": 'root ::= start ignore\nstart ::= "x" root?\nignore ::= "y"',
    "similar names": 'root ::= fooBar foo-bar\nfooBar ::= "x"\nfoo-bar ::= "y"',
    "token": "root ::= <[5]> !<[6]>",
    "any character": 'root ::= . [^"] [^\\x00-\\x1f]',
    "thousands of rules": "\n".join(f"{'root' if not n else f'r{n}'} ::= r{n + 1}" for n in range(4000))
    + '\nr4000 ::= "x"',
    "two parses of each text": 'root ::= [a-z ] root "b" | [a-z ] root "c" | "d"',
}


@pytest.mark.parametrize("grammar", GOOD_GRAMMARS.values(), ids=GOOD_GRAMMARS)
def test_a_good_grammar_compiles(sandbox: GrammarSandbox, vocab: Vocab, grammar: str) -> None:
    compiled = sandbox.compile(JobParams(grammar=grammar))
    assert ConstraintTokenizer(vocab).compile(compiled).allowed_tokens()


def accepts(vocab: Vocab, gbnf: str, text: str) -> bool:
    """Return whether a grammar accepts a whole text, given as tokens of one byte or character each."""
    pieces = {vocab.piece(token): token for token in range(vocab.n_tokens)}
    constraint = constraint_of(vocab, gbnf)
    try:
        constraint.accept([pieces[bytes([byte])] for byte in text.encode()])
    except JobRejected:
        return False
    return allows(constraint, vocab.eos)


JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("gbnf", "good", "bad"),
    [
        ('root ::= [a-z]+ "z"', ["az", "zz", "azz"], ["z", "ab", ""]),
        ('root ::= word " " root | word\nword ::= [a-z]+ "z"', ["az bz", "zz"], ["az b", "az "]),
        ("root ::= [^a-c\\]]{2,3}", ["de", "xyz"], ["d", "da", "d]", "wxyz"]),
        ('root ::= "a"* "b"? ("c" | "d"){2}', ["cd", "aabcc"], ["abc", "bbcd"]),
        ('root ::= "a" "b"{0} ("c" | "d"){0,0} "e"', ["ae"], ["abe", "ace"]),
        ('root ::= [a\\-z]+ "\\-"', ["a-z-"], ["b-", "a"]),
        ('root ::= ("a"{2}){2}', ["aaaa"], ["aa", "aaaaaa"]),
        ('root ::= ["\\\\/.*-]+', ['"\\/.*-'], ["a"]),
        ('root ::= "\\x41\\u0042" [\\U00000043-D]', ["ABC", "ABD"], ["ABE", "ab"]),
        ('root ::= "a\\nb\\t\\"/"', ['a\nb\t"/'], ["a b"]),
        (
            JSON,
            ['{"a": [1, -2.5e3, "\\u00e9", {}], "b":true}', "{}"],
            ['{"a": [1,]}', "[1]", '{"a": "\n"}', '{"a": 01'],
        ),
    ],
)
def test_a_grammar_accepts_the_texts_that_gbnf_defines(
    vocab: Vocab, gbnf: str, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(vocab, gbnf, text)] == []
    assert [text for text in bad if accepts(vocab, gbnf, text)] == []


def test_a_negated_token_is_no_end_token(sandbox: GrammarSandbox, vocab: Vocab) -> None:
    compiled = sandbox.compile(JobParams(grammar='root ::= "a" !<[5]> "b"'))
    constraint = ConstraintTokenizer(vocab).compile(compiled)
    constraint.accept([next(token for token in range(vocab.n_tokens) if vocab.piece(token) == b"a")])
    excluded = {5, *vocab.end_tokens}
    assert [token for token in range(vocab.n_tokens) if token not in constraint.allowed_tokens()] == sorted(excluded)


def test_control_tokens_are_never_allowed_as_text(vocab: Vocab) -> None:
    allowed = constraint_of(vocab, "root ::= .+").allowed_tokens()
    assert not any(token in allowed for token in range(vocab.n_tokens) if not vocab.piece(token))


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BAD_SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "deep": (nested_schema(150), "nests deeper than 128 levels"),
    "remote reference": ({"$ref": "https://example.com/schema.json"}, "copy it into $defs"),
    "unknown type": ({"type": "nothing"}, "Invalid type: nothing"),
    "wrong type": ({"properties": 5}, "properties must be an object"),
    "huge": ({"enum": ["x" * 70_000]}, "larger than"),
    "bad pattern": ({"type": "string", "pattern": "("}, "regex parse error"),
    "not supported": ({"type": "array", "items": {"not": {"type": "string"}}}, "`not` at #/items is not supported"),
    "overlapping": (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "its schemas 0 and 1 may match the same value",
    ),
}


@pytest.mark.parametrize(("schema", "reason"), BAD_SCHEMAS.values(), ids=BAD_SCHEMAS)
def test_a_bad_schema_is_refused_with_a_reason(sandbox: GrammarSandbox, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(JobRejected) as refused:
        sandbox.compile(JobParams(json_schema=schema))
    assert refused.value.code == ErrorCode.INVALID_GRAMMAR
    assert reason in refused.value.message


def names_of_format(name: str) -> dict[str, Any]:
    return {"type": "object", "propertyNames": {"format": name}, "additionalProperties": {"type": "integer"}}


def number(**keywords: Any) -> dict[str, Any]:
    return {"type": "number", **keywords}


def integer(**keywords: Any) -> dict[str, Any]:
    return {"type": "integer", **keywords}


ADMIN = {
    "type": "object",
    "properties": {"admin": {"const": False}},
    "required": ["admin"],
    "patternProperties": {"^x": {"type": "integer"}},
}
TREE = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
    },
}
"""A recursive schema, as pydantic makes it."""


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, ["1", '"x"', "[null]"], ["nothing"]),
        (nested_schema(20), ["[" * 20 + '"x"' + "]" * 20], ["[" * 19 + '"x"' + "]" * 19]),
        ({"type": "string"}, ['"a\\n"'], ['"a\n"']),
        ({"type": "integer", "minimum": 3, "maximum": 20}, ["3", "20"], ["2", "21", "3.5"]),
        ({"type": "integer", "multipleOf": 7}, ["14", "700"], ["15"]),
        ({"type": "string", "pattern": "\\d+"}, ['"a1b"', '"22"'], ['"ab"']),
        ({"type": "string", "maxLength": 70}, ['"' + 70 * "a" + '"'], ['"' + 71 * "a" + '"']),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 70}, ["[]", "[null, null]"], ["[1]"]),
        (
            {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
            ['{"n_a": 1}'],
            ['{"n_a": "x"}', '{"m": 1}'],
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "null"], ["true"]),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a": 1}', '{"b": 2}'],
            ['{"a": 1, "b": 2}', "{}"],
        ),
        (
            {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}, "type": "object"},
            ["{}", '{"b": 2}', '{"a": 1, "b": 2}'],
            ['{"a": 1}'],
        ),
        ({"type": "string", "pattern": '^[^"]*$'}, ['"a\\\\\\n"', '"é"'], ['"\\""', '"a\\""']),
        ({"type": "string", "pattern": r'^[^<>:"/\\|?*]+$'}, ['"a b"', '"\\t"'], ['"\\""', '"\\\\"', '"a|"']),
        ({"type": "string", "pattern": r"^(\PP|\p{Cc}|[\x00-\x1f])*$"}, ['"a\\n"'], ['"\\""', '"\\\\"']),
        ({"type": "string", "pattern": r'^[\x00-\x1f"a-z]+$'}, ['"a\\"\\t"'], ['"\\\\"', '"A"']),
        (
            {"patternProperties": {'^[^"]*$': {}}, "additionalProperties": False, "type": "object"},
            ['{"a": 1}'],
            ['{"\\"": 1}'],
        ),
        (
            {**ADMIN, "additionalProperties": {"type": "boolean"}},
            ['{"admin": false, "é\\"": true}'],
            ['{"admin": false, "\\u0061dmin": true}', '{"admin": false, "\\u0078": true}'],
        ),
        (ADMIN, ['{"admin": false, "b": "x"}'], ['{"admin": false, "admi\\u006e": 1}', '{"admin": false, "a\\/b": 1}']),
        (
            {"type": "string", "format": "date"},
            ['"2023-01-31"', '"2024-02-29"', '"2000-02-29"', '"0004-02-29"', '"2023-02-28"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-02-30"', '"2023-04-31"', '"2023-13-01"', '"0000-01-01"'],
        ),
        (
            {"type": "string", "format": "time"},
            ['"23:59:59Z"', '"00:00:00.123+05:30"'],
            ['"10:10:60Z"', '"24:00:00Z"', '"10:10:10"', '"10:10:10+24:00"'],
        ),
        (
            {"type": "string", "format": "date-time", "maxLength": 20},
            ['"2024-02-29T10:00:59Z"'],
            ['"2023-02-29T10:00:00Z"', '"2023-01-01T10:00:60Z"', '"2024-02-29T10:00:59.1Z"'],
        ),
        (names_of_format("ipv4"), ['{"127.0.0.1": 1}', "{}"], ['{"127.0.0.256": 1}', '{"a": 1}']),
        (names_of_format("date-time"), ['{"2024-02-29T10:00:00Z": 1}'], ['{"2024-02-30T10:00:00Z": 1}']),
        (names_of_format("idn-email"), ['{"a.b@example.org": 1}'], ['{"a": 1}', '{"a@b@c.d": 1}']),
        (names_of_format("hostname"), ['{"example.org": 1}'], ['{"-a": 1}', '{"a-": 1}', '{"a..b": 1}']),
        (names_of_format("uri"), ['{"https://example.org/a": 1}'], ['{"a": 1}']),
        (names_of_format("ipv6"), ['{"0:0:0:0:0:0:0:1": 1}'], ['{"1:2": 1}']),
        (names_of_format("duration"), ['{"P3DT4H": 1}', '{"PT5M": 1}'], ['{"P": 1}', '{"P3DT": 1}']),
        (names_of_format("path"), ['{"a/b": 1}'], ['{"a": "x"}']),
        (number(exclusiveMinimum=0, maximum=0.5), ["0.1", "0.5"], ["0", "0.0", "-0", "0.6"]),
        (number(exclusiveMinimum=2, maximum=2.5), ["2.1"], ["2", "2.0"]),
        (number(minimum=-0.5, exclusiveMaximum=0), ["-0.1"], ["0", "-0", "-0.0"]),
        (number(exclusiveMinimum=0), ["0.0000000001", "7"], ["0", "-1"]),
        (number(allOf=[{"exclusiveMinimum": 0}, {"maximum": 0.5}]), ["0.1"], ["0", "1"]),
        (number(minimum=-1e308, maximum=1e308), ["-1000000000000000000", "0.5"], []),
        (integer(minimum=-(2**63), maximum=2**63 - 1), ["-1", "0", "1000000000000000000"], ["9223372036854775808"]),
        (integer(minimum=10**18), ["1000000000000000000"], ["999999999999999999", "-1"]),
        (integer(maximum=-(10**18)), ["-1000000000000000000"], ["-999999999999999999", "1"]),
        (integer(minimum=2**53 + 1), ["9007199254740994"], ["9007199254740992"]),
        (integer(exclusiveMinimum=2**53), ["9007199254740994"], ["9007199254740992"]),
        (integer(exclusiveMaximum=10**18), ["1"], ["1000000000000000000"]),
        (TREE, ['{"v": 1, "next": {"v": 2, "next": null}}'], ['{"v": 1}']),
    ],
)
def test_a_schema_allows_the_values_that_it_describes(
    sandbox: GrammarSandbox, vocab: Vocab, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    compiled = sandbox.compile(JobParams(json_schema=schema))
    assert [text for text in good if not is_whole_output(vocab, compiled, text)] == []
    assert [text for text in bad if is_whole_output(vocab, compiled, text)] == []


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"regex": r"\d{2}/(am|pm)"}, ["12/am"], ["1/am", "12/a", "12/am "]),
        ({"choice": ['say "no"\n', "a\\b", "é|x.*"]}, ['say "no"\n', "a\\b", "é|x.*"], ["say", "a", "éx", "x.*"]),
        ({"choice": ["a", "ab"]}, ["a", "ab"], ["b", "aab"]),
        ({"lark": 'start: pair ("," pair)*\npair: "(" pair? ")"'}, ["(),()", "(())"], ["(", "(,)"]),
    ],
)
def test_a_regex_a_choice_and_a_lark_grammar_allow_whole_outputs_only(
    sandbox: GrammarSandbox, vocab: Vocab, constraint: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    compiled = sandbox.compile(JobParams(**constraint))
    assert [text for text in good if not is_whole_output(vocab, compiled, text)] == []
    assert [text for text in bad if is_whole_output(vocab, compiled, text)] == []


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"regex": "("}, "regex parse error.*unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"lark": "begin: /x/"}, "no start rule found"),
        ({"lark": "start: missing"}, "missing"),
        ({"regex": "x", "grammar_root": "start"}, "not with regex"),
    ],
)
def test_a_bad_regex_or_lark_grammar_is_refused_with_a_reason(
    sandbox: GrammarSandbox, constraint: dict[str, Any], reason: str
) -> None:
    with pytest.raises(JobRejected, match=reason) as refused:
        sandbox.compile(JobParams(**constraint))
    assert refused.value.code == ErrorCode.INVALID_GRAMMAR


def test_a_grammar_may_have_another_root_and_a_schema_may_not(sandbox: GrammarSandbox) -> None:
    assert sandbox.compile(JobParams(grammar='start ::= "x"', grammar_root="start"))
    with pytest.raises(JobRejected, match="grammar_root"):
        sandbox.compile(JobParams(json_schema={}, grammar_root="start"))


HOSTILE: tuple[dict[str, Any], ...] = (
    {"json_schema": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}"} for n in range(1, 40)]}},
    {"lark": "start: A\nA: " + " & ".join(f"/(?s:.*)a.{{{n}}}(?s:.*)/" for n in range(1, 40))},
)
"""llguidance needs minutes for each of these, whatever its limits are. So grammars are compiled in another process."""


def test_a_grammar_whose_result_is_known_does_not_wait_for_the_trial_of_another_one(sandbox: GrammarSandbox) -> None:
    request = JobParams(regex="[a-c]+")
    known = sandbox.compile(request)
    with sandbox._process_lock:  # held during a trial
        assert sandbox.compile(request) == known


def test_a_grammar_that_takes_too_long_is_refused_and_not_tried_again(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab, timeout_s=0.5)
    for constraint in HOSTILE:
        for _ in range(2):
            with pytest.raises(JobRejected, match=r"more than 0\.5 s"):
                sandbox.compile(JobParams(**constraint))
            assert sandbox._process is None
    assert sandbox.compile(JobParams(grammar='root ::= "a"'))
    sandbox.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, and wait until all its threads stand still."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def test_a_grammar_is_compiled_although_the_machine_gives_the_process_no_time(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab, timeout_s=0.3)
    sandbox.compile(JobParams(regex="b"))
    assert sandbox._process is not None
    child = sandbox._process._popen
    stop(child)
    resume = threading.Timer(0.5, child.send_signal, [signal.SIGCONT])
    resume.start()
    try:
        assert sandbox.compile(JobParams(regex="a"))
    finally:
        resume.join()
        sandbox.close()


def test_a_process_that_does_not_answer_is_replaced_and_its_grammar_tried_again(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = GrammarSandbox(vocab, timeout_s=0.3)
    sandbox.compile(JobParams(regex="b"))
    monkeypatch.setattr("llamaq.worker.generation.grammar.sandbox.LONGEST_WAIT_FACTOR", 1)
    assert sandbox._process is not None
    stop(sandbox._process._popen)
    with pytest.raises(JobRejected, match="too busy"):
        sandbox.compile(JobParams(regex="a"))
    monkeypatch.undo()
    assert sandbox.compile(JobParams(regex="a"))
    sandbox.close()


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


def test_a_grammar_process_that_died_is_replaced(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab)
    sandbox.compile(JobParams(grammar='root ::= "a"'))
    process = sandbox._process
    assert process is not None
    os.kill(process._popen.pid, signal.SIGKILL)
    process._popen.wait()
    with pytest.raises(JobRejected, match="too much memory"):
        sandbox.compile(JobParams(grammar='root ::= "b"'))
    assert sandbox.compile(JobParams(grammar='root ::= "c"'))
    sandbox.close()


@pytest.mark.starts_processes
def test_a_process_that_cannot_start_is_an_engine_error(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "pack_vocabulary", lambda _: b"no vocabulary")
    sandbox = GrammarSandbox(vocab)
    with pytest.raises(EngineError, match="does not start"):
        sandbox.compile(JobParams(grammar='root ::= "a"'))
    sandbox.close()


def test_the_process_starts_before_the_first_grammar(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "START_DELAY_S", 0.01)
    sandbox = GrammarSandbox(vocab)
    wait_until(lambda: sandbox._process is not None, "the process starts")
    sandbox.close()


def test_a_sandbox_that_is_closed_early_starts_no_process(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab)
    assert sandbox._process is None
    sandbox.close()
    sandbox._start_early()
    assert sandbox._process is None


def test_a_closed_sandbox_compiles_no_more_grammars(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab)
    sandbox.compile(JobParams(grammar='root ::= "a"'))
    sandbox.close()
    with pytest.raises(EngineError, match="the worker stops"):
        sandbox.compile(JobParams(grammar='root ::= "b"'))
    assert sandbox._process is None


def test_the_process_ends_when_its_socket_is_closed(vocab: Vocab) -> None:
    process = sandbox_module._SandboxProcess(vocab, 3)
    process.await_start()
    process._socket.close()
    assert process._popen.wait(timeout=10) == 0


def test_the_oldest_results_are_removed_from_the_cache(sandbox: GrammarSandbox) -> None:
    for n in range(sandbox_module.MAX_CACHED_RESULTS + 5):
        with pytest.raises(JobRejected):
            sandbox.compile(JobParams(grammar=f'other{n} ::= "x"'))
    assert len(sandbox._results) == sandbox_module.MAX_CACHED_RESULTS


def test_the_vocabulary_is_not_copied_for_llguidance(vocab: Vocab) -> None:
    assert _Tokens(vocab).tokens is vocab.pieces


def test_the_kinds_of_tokens_are_kinds_that_llguidance_knows() -> None:
    assert set(SLICES) < set(llguidance.LLTokenizer.general_slices())


def test_the_process_gets_the_part_of_the_vocabulary_that_grammars_need(tag_vocab: Vocab) -> None:
    copied = CopiedVocabulary.unpack(pack_vocabulary(tag_vocab))
    assert list(copied.pieces) == list(tag_vocab.pieces)
    assert copied.pieces.hidden == tag_vocab.pieces.hidden
    names = ("end_tokens", "eos", "bos")
    assert [getattr(copied, name) for name in names] == [getattr(tag_vocab, name) for name in names]


def test_the_process_has_no_llama_cpp_in_its_memory(sandbox: GrammarSandbox) -> None:
    sandbox.compile(JobParams(regex="a"))
    assert sandbox._process is not None
    maps = Path(f"/proc/{sandbox._process._popen.pid}/maps").read_text()
    assert "llguidance" in maps
    assert "libllama" not in maps
