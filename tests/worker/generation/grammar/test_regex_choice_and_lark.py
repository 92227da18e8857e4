"""Grammars of a regex, of a choice, and in the language of Lark."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.grammars import is_whole_output

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox


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
    compiled = sandbox.check(JobParams(**constraint)).text
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
        sandbox.check(JobParams(**constraint))
    assert refused.value.code == ErrorCode.INVALID_GRAMMAR
