"""Grammars in Lark in which a forced text may have no end."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.grammars import token_of

from llamaq.common.protocol.answer_tags import CALL_CLOSE, CALL_OPEN
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.producer.answer_parts.answer_format import AnswerForm, AnswerFormat
from llamaq.producer.answer_parts.answer_grammar import answer_grammar
from llamaq.worker.generation.grammar.endless_terminals import with_bounded_forcing
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer

TOOLS: list[dict[str, Any]] = [{"function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "^a+$"}}}}}]


@pytest.mark.parametrize(
    "terminal", ["/a+/", '"a"+', "/(a|aa)*/", "/[aa]+/", "/a/ +", "A+\nA: /a/", "/[ab]+/ & /[ac]+/", "/[ab&&a]+/"]
)
def test_a_grammar_whose_longest_text_has_no_end_does_not_hang(
    sandbox: GrammarSandbox, vocab: Vocab, terminal: str
) -> None:
    grammar = sandbox.check(JobParams(lark=f'start: "b" T "a"\nT: {terminal}')).text
    constraint = ConstraintTokenizer(vocab).compile(grammar)
    constraint.accept([token_of(vocab, text) for text in "baa"])
    assert constraint.allowed_tokens().only() == token_of(vocab, "a")


@pytest.mark.parametrize(
    "lark",
    [
        "start: T\nT: /ab/+",
        'start: T\nT: "a"\n  | "b"+',
        'start: x\nx[lazy]: "a"+',
        'start: /[ab]/\n%ignore " "+',
        r"start: /\[ab]+/",
        r"start: /[^\x00-`b-\x{10ffff}]+/",
        "start: /[a-c--bc]+/",
        "start: /(?x)[a ]+/",
        "start: /[a ]+/x",
        r"start: /\p{L}+/",
        "start: /a{2,}/",
    ],
)
def test_a_grammar_that_may_repeat_one_text_without_end_forces_no_text(lark: str) -> None:
    assert with_bounded_forcing(lark) == f'{lark}\n%llguidance {{"no_forcing": true}}'


@pytest.mark.parametrize(
    "lark",
    [
        r"start: /[0-9]+/ /(.|\n)*/ /(?s:.*)/ /[^\"\\]{2,}/ /a{3}/",
        "start: INT\nINT: /[0-9]/+",
        'start: "a"+ x*\nx: "b"+ | "c" // T: "a"+\n# A & B',
        'start: %json {"type": "string", "pattern": "^a+$"}',
        *(
            answer_grammar(AnswerForm(format=each, reasoning_open="<think>", reasoning_close="</think>"), TOOLS)
            for each in AnswerFormat
        ),
        answer_grammar(AnswerForm(format=AnswerFormat.HERMES, tag_tokens={CALL_OPEN: 5, CALL_CLOSE: 6}), TOOLS),
    ],
)
def test_a_grammar_that_repeats_only_sets_of_characters_is_not_changed(lark: str) -> None:
    assert with_bounded_forcing(lark) == lark
