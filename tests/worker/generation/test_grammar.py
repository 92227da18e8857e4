from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamaq.common.errors import EngineError, ErrorCode, JobRejected
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.generation.grammar import sandbox as sandbox_module
from llamaq.worker.generation.grammar.compiled_grammar import Grammar
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.static_checks import MAX_NESTING
from llamaq.worker.generation.numpy_sampler import LogitSampler


@pytest.fixture(scope="module")
def blob(demo_model: Path) -> bytes:
    return extract_vocab(demo_model)


@pytest.fixture(scope="module")
def sandbox(blob: bytes) -> Iterator[GrammarSandbox]:
    sandbox = GrammarSandbox(blob, timeout_s=3)
    yield sandbox
    sandbox.close()


def generate(vocab: Vocab, text: str, params: SamplingDefaults, *, n_max: int = 200, seed: int = 1) -> list[int]:
    """Sample tokens from random logits with a grammar, up to the first end token or `n_max` tokens."""
    noise = np.random.default_rng(seed)
    sampler = LogitSampler(params, seed=seed, grammar=Grammar(vocab, text))
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
        "properties": {"age": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["a", "bc"]}}},
        "required": ["age", "tags"],
    }
    text = sandbox.compile(JobParams(json_schema=schema))
    whole = 0
    for seed in range(4):
        tokens = generate(vocab, text, params, seed=seed)
        if len(tokens) < 200:
            value = json.loads(vocab.decode(tokens))
            assert isinstance(value["age"], int)
            assert set(value["tags"]) <= {"a", "bc"}
            whole += 1
    assert whole


def test_an_end_token_is_allowed_only_where_the_grammar_can_end(vocab: Vocab) -> None:
    grammar = Grammar(vocab, 'root ::= "ab"')
    a, b = vocab.encode("a")[1], vocab.encode("b")[1]
    ends = [grammar.allows(vocab.eos or 0)]
    for n in range(2):
        grammar.accept([a, b][: n + 1])
        ends.append(grammar.allows(vocab.eos or 0))
    assert ends == [False, False, True]
    assert not grammar.allows(a)


def test_a_grammar_that_allows_only_the_end_draws_an_end_token(vocab: Vocab) -> None:
    assert generate(vocab, 'root ::= ""', SamplingDefaults()) == []


def test_a_token_that_the_grammar_does_not_allow_is_never_accepted(vocab: Vocab) -> None:
    grammar = Grammar(vocab, 'root ::= "ab"')
    with pytest.raises(JobRejected) as refused:
        grammar.accept(vocab.encode("b")[1:])
    assert refused.value.code == ErrorCode.GRAMMAR_EXHAUSTED


def test_the_tokens_of_an_earlier_attempt_are_accepted_before_the_next_draw(vocab: Vocab) -> None:
    text, params = 'root ::= "(" [a-z ]+ ")"', SamplingDefaults()
    logits = np.random.default_rng(1).normal(size=vocab.n_tokens).astype(np.float32)
    history: list[int] = []
    first = LogitSampler(params, seed=3, grammar=Grammar(vocab, text))
    for _ in range(6):
        history.append(first.sample(logits, history, 0))
    resumed = LogitSampler(params, seed=3, grammar=Grammar(vocab, text))
    assert resumed.sample(logits, history[:5], 0) == history[5]


def test_a_draw_that_the_grammar_allows_is_the_same_without_the_grammar(vocab: Vocab) -> None:
    logits = np.random.default_rng(1).normal(size=vocab.n_tokens).astype(np.float32)
    free = LogitSampler(SamplingDefaults(), seed=3).sample(logits, [], 0)
    assert LogitSampler(SamplingDefaults(), seed=3, grammar=Grammar(vocab, "root ::= .+")).sample(logits, [], 0) == free


def test_a_refused_draw_is_repeated_among_the_allowed_tokens_with_the_largest_logits(vocab: Vocab) -> None:
    logits = np.random.default_rng(2).normal(size=vocab.n_tokens).astype(np.float32)
    grammar = Grammar(vocab, "root ::= [0-9]")
    allowed = [token for token in range(vocab.n_tokens) if grammar.allows(token)]
    best = sorted(allowed, key=lambda token: -logits[token])[:2]
    params = SamplingDefaults(top_k=2, top_p=1, min_p=0)
    drawn = {LogitSampler(params, seed=n, grammar=grammar).sample(logits, [], 0) for n in range(40)}
    assert drawn == set(best)


def test_a_sampler_and_its_grammar_may_be_closed_twice(vocab: Vocab) -> None:
    sampler = LogitSampler(SamplingDefaults(), seed=1, grammar=Grammar(vocab, 'root ::= "a"'))
    sampler.close()
    sampler.close()


NESTED = "(" * (MAX_NESTING + 1) + '"a"' + ")" * (MAX_NESTING + 1)
BAD_GRAMMARS = {
    "empty": ("", "no rules"),
    "comment": ("# nothing", "no rules"),
    "no root": ('a ::= "x"', "does not contain a 'root'"),
    "undefined rule": ('root ::= "x" nothing', "Undefined rule identifier 'nothing'"),
    "syntax": ('root ::= "a"\n  b := "c"', "expecting ::= at line 2, column 5"),
    "unterminated": ('root ::= "abc', "unexpected end of input"),
    "bad escape": (r'root ::= "\q"', "unknown escape at line 1, column 11"),
    "left recursion": ('root ::= root "x" | "y"', "'root' is left-recursive"),
    "hidden left recursion": (
        'root ::= [a-z]{900} c\nc ::= a c "x" | "y"\na ::= b\nb ::= "z"?',
        "'c' is left-recursive",
    ),
    "indirect left recursion": ('root ::= a\na ::= (b | "x") "y"\nb ::= "z"* root', "left-recursive"),
    "nested": (f"root ::= {NESTED}", "nest deeper"),
    "nested 20,000 deep": ("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "nest deeper"),
    "repetition": ('root ::= "x"{1000000}', "repetitions exceeds"),
    "token reference": ('root ::= "a" !<[5]>', "refers to a token"),
    "NUL": ('root ::= "a\0"', "NUL"),
    "impossible": ("root ::= [^\\x00-\\UFFFFFFFF]", "is allowed first"),
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
}


@pytest.mark.parametrize("grammar", GOOD_GRAMMARS.values(), ids=GOOD_GRAMMARS)
def test_a_good_grammar_is_returned_unchanged(sandbox: GrammarSandbox, grammar: str) -> None:
    assert sandbox.compile(JobParams(grammar=grammar)) == grammar


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BAD_SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "deep": (nested_schema(80), "nests deeper"),
    "remote reference": ({"$ref": "https://example.com/schema.json"}, "Fetching remote schemas is not allowed"),
    "dangling reference": ({"$ref": "#/definitions/x"}, "Error resolving ref"),
    "unknown type": ({"type": "nothing"}, "Unrecognized schema"),
    "wrong type": ({"properties": 5}, "cannot be converted to a grammar"),
    "huge": ({"enum": ["x" * 70_000]}, "larger than"),
    "huge by repetition": ({"type": "string", "minLength": 10**9}, "cannot be converted to a grammar: MemoryError"),
    "bad pattern": ({"type": "string", "pattern": "("}, "Pattern must start with"),
}


@pytest.mark.parametrize(("schema", "reason"), BAD_SCHEMAS.values(), ids=BAD_SCHEMAS)
def test_a_bad_schema_is_refused_with_a_reason(sandbox: GrammarSandbox, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(JobRejected) as refused:
        sandbox.compile(JobParams(json_schema=schema))
    assert refused.value.code == ErrorCode.INVALID_GRAMMAR
    assert reason in refused.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {},
        nested_schema(20),
        {"type": "integer", "minimum": -(10**20), "maximum": 10**30},
        {"type": "object", "properties": {"n": {"$ref": "#/definitions/n"}}, "definitions": {"n": {"type": "null"}}},
    ],
    ids=["any", "nested", "big numbers", "reference"],
)
def test_a_good_schema_becomes_a_grammar(sandbox: GrammarSandbox, vocab: Vocab, schema: dict[str, Any]) -> None:
    Grammar(vocab, sandbox.compile(JobParams(json_schema=schema))).close()


def test_a_grammar_may_have_another_root_and_a_schema_may_not(sandbox: GrammarSandbox) -> None:
    assert sandbox.compile(JobParams(grammar='start ::= "x"', grammar_root="start"))
    with pytest.raises(JobRejected, match="grammar_root"):
        sandbox.compile(JobParams(json_schema={}, grammar_root="start"))


EXPONENTIAL = 'root ::= [a-z ] root "b" | [a-z ] root "c" | "d"'
"""The number of parses of a text doubles with each character."""


def test_a_grammar_that_takes_too_long_is_refused_and_not_tried_again(blob: bytes) -> None:
    sandbox = GrammarSandbox(blob, timeout_s=0.5)
    for _ in range(2):
        with pytest.raises(JobRejected, match=r"more than 0\.5 s"):
            sandbox.compile(JobParams(grammar=EXPONENTIAL))
        assert sandbox._process is None
    assert sandbox.compile(JobParams(grammar='root ::= "a"'))
    sandbox.close()


def test_a_step_that_takes_too_long_rejects_the_job(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaq.worker.generation.grammar.compiled_grammar.MAX_STEP_S", 0.01)
    grammar = Grammar(vocab, EXPONENTIAL)
    with pytest.raises(JobRejected, match="ambiguous"):
        grammar.accept([vocab.encode("a")[1]] * 100)


def test_a_grammar_process_that_died_is_replaced(blob: bytes) -> None:
    sandbox = GrammarSandbox(blob)
    sandbox.compile(JobParams(grammar='root ::= "a"'))
    process = sandbox._process
    assert process is not None
    os.kill(process._popen.pid, signal.SIGKILL)
    process._popen.wait()
    with pytest.raises(JobRejected, match="crashes on it"):
        sandbox.compile(JobParams(grammar='root ::= "b"'))
    assert sandbox.compile(JobParams(grammar='root ::= "c"'))
    sandbox.close()


@pytest.mark.starts_processes
def test_a_process_that_cannot_start_is_an_engine_error() -> None:
    sandbox = GrammarSandbox(b"no vocabulary")
    with pytest.raises(EngineError, match="does not start"):
        sandbox.compile(JobParams(grammar='root ::= "a"'))
    sandbox.close()


def test_the_process_ends_when_its_socket_is_closed(blob: bytes) -> None:
    process = sandbox_module._SandboxProcess(blob)
    process.await_start()
    process._socket.close()
    assert process._popen.wait(timeout=10) == 0


def test_the_oldest_results_are_removed_from_the_cache(sandbox: GrammarSandbox) -> None:
    for n in range(sandbox_module.MAX_CACHED_RESULTS + 5):
        with pytest.raises(JobRejected):
            sandbox.compile(JobParams(grammar=f'other{n} ::= "x"'))
    assert len(sandbox._results) == sandbox_module.MAX_CACHED_RESULTS
