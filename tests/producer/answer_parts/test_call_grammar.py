from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.producer.answer_parts.answer_format import AnswerFormat
from llamaq.producer.answer_parts.call_grammar import call_grammar
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city={"type": "string"}), tool("stop")]
WEATHER = '{"name": "weather", "arguments": {"city": "Ulm"}}'
STOP = '{"name": "stop", "arguments": {}}'


@pytest.fixture(scope="module")
def sandbox(chat_model: Path) -> Iterator[GrammarSandbox]:
    sandbox = GrammarSandbox(extract_vocab(chat_model))
    yield sandbox
    sandbox.close()


def allows(sandbox: GrammarSandbox, vocab: Vocab, answer_format: AnswerFormat, text: str, *, parallel: bool) -> bool:
    """Return whether the grammar of a format allows the text as a whole answer."""
    compiled = sandbox.compile(JobParams(lark=call_grammar(answer_format, TOOLS, parallel=parallel)))
    constraint = ConstraintTokenizer(vocab).compile(compiled)
    pieces = {vocab.piece(token): token for token in range(vocab.n_tokens)}
    try:
        constraint.accept([pieces[bytes([byte])] for byte in text.encode()])
    except JobRejected:
        return False
    return any(constraint.allowed_mask()[token] for token in vocab.end_tokens)


@pytest.mark.parametrize(
    ("answer_format", "good", "only_parallel", "bad"),
    [
        (
            AnswerFormat.HERMES,
            f"<tool_call>\n{WEATHER}\n</tool_call>",
            f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{STOP}\n</tool_call>",
            '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
        ),
        (AnswerFormat.MISTRAL, f"[TOOL_CALLS][{STOP}]", f"[TOOL_CALLS][{STOP},{WEATHER}]", "[TOOL_CALLS][]"),
        (AnswerFormat.JSON, WEATHER, None, '{"name": "other", "arguments": {}}'),
        (AnswerFormat.LLAMA3, STOP.replace("arguments", "parameters"), None, STOP),
    ],
)
def test_a_grammar_allows_calls_of_the_tools_only(
    sandbox: GrammarSandbox,
    chat_vocab: Vocab,
    answer_format: AnswerFormat,
    good: str,
    only_parallel: str | None,
    bad: str,
) -> None:
    for parallel in (True, False):
        assert allows(sandbox, chat_vocab, answer_format, good, parallel=parallel)
        assert not allows(sandbox, chat_vocab, answer_format, bad, parallel=parallel)
        assert not allows(sandbox, chat_vocab, answer_format, "Hello", parallel=parallel)
    if only_parallel is not None:
        assert allows(sandbox, chat_vocab, answer_format, only_parallel, parallel=True)
        assert not allows(sandbox, chat_vocab, answer_format, only_parallel, parallel=False)


def test_a_grammar_may_name_control_tokens(sandbox: GrammarSandbox, chat_vocab: Vocab) -> None:
    compiled = sandbox.compile(JobParams(lark='start: <|im_start|> "x"'))
    mask = ConstraintTokenizer(chat_vocab).compile(compiled).allowed_mask()
    assert [chat_vocab.piece_with_special(int(token)) for token in mask.nonzero()[0]] == [b"<|im_start|>"]
    with pytest.raises(JobRejected, match=r"nothing"):
        sandbox.compile(JobParams(lark='start: <|nothing|> "x"'))


def test_the_grammar_of_harmony_names_its_channels() -> None:
    grammar = call_grammar(AnswerFormat.HARMONY, TOOLS)
    assert (
        'call0: <|channel|> "commentary to=functions.weather " <|constrain|> "json" <|message|> arguments0' in grammar
    )
    assert json.dumps(TOOLS[1]["function"]["parameters"]) in grammar
