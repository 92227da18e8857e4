"""Recognizes the grammars in Lark that compile in a short time: those of tool calls, around plain JSON schemas.

The clients of llamaq write a grammar for answers that must call a tool, or whose content matches a schema
(`llamaq.producer.answer_parts.answer_grammar`). Any sender may write one, so the worker reads all of it. Each line must
have one of the forms below. In these forms, no rule can refer to itself, and no regular expression is the sender's,
except in the schemas. The schemas must be plain, and together as small as one plain schema must be. So such a grammar
takes no more time and memory than a plain schema. Every other grammar in Lark is tried in the sandbox process.
"""

from __future__ import annotations

import json
import re
from math import inf
from typing import Any

from llamaq.common.json_schema.rewriting import SCHEMA_OPTIONS
from llamaq.common.protocol.answer_tags import CHANNEL, CONSTRAIN, END, MESSAGE, START
from llamaq.common.protocol.output_params import MAX_TAG_CHARS
from llamaq.worker.generation.grammar.json_schemas import (
    MAX_PLAIN_CHARS,
    MAX_PLAIN_SUBSCHEMAS,
    part_of_limits,
)

_OPTIONS = "x-guidance"
_OPTIONS_CHARS = len(json.dumps({_OPTIONS: SCHEMA_OPTIONS}))
_CHARACTER = r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-f]{4}))'
_STRING = f'"{_CHARACTER}*"'
_TAG_TEXT = f'"{_CHARACTER}{{1,{MAX_TAG_CHARS}}}"'
_TOKEN = r"<\[\d{1,9}\]>"
_TAG = f"(?:{_TOKEN}|{_TAG_TEXT})"
_ANY_TEXT = re.escape(r"/(.|\n)*/")
_NEW_LINE = re.escape(r'"\n"')
_SPLIT_OPENING = rf'"\{{" "\\"name\\"" ":" " "\? {_STRING} "," " "\? {_STRING} ":" " "\?'
"""The beginning of a call beside content that may begin in the same way."""
_ENDS = r"(?:calls|content|calls \| content)"
_CHANNEL, _CONSTRAIN, _MESSAGE, _END, _START = map(re.escape, (CHANNEL, CONSTRAIN, MESSAGE, END, START))
_REASONED = f'TEXT {_END} {_START} "assistant"'
_FORMS = (
    rf"start: {_ENDS}",
    rf"start: (?:reasoning|\({_TAG} reasoning\)\?) SPACE\? \({_ENDS}\)",
    rf"reasoning: {_ANY_TEXT} {_TOKEN}",
    rf"reasoning\[suffix={_TAG_TEXT}\]: {_ANY_TEXT}",
    re.escape(r"SPACE: /[ \n]{1,4}/"),
    rf"calls: call(?: \({_NEW_LINE} call\)\*)?",
    rf"call: {_TAG} {_NEW_LINE} object {_NEW_LINE} {_TAG}",
    rf'calls: {_TAG} "\[" object (?:\(/, \?/ object\)\*)? "\]"',
    r"calls: object",
    r"object: object\d+(?: \| object\d+)*",
    rf'object\d+: (?:{_STRING}|{_SPLIT_OPENING}) arguments\d+ "\}}"',
    # The format harmony:
    rf'start: (?:{_REASONED}|\({_CHANNEL} "analysis" {_MESSAGE} {_REASONED}\)\?) rest',
    rf"TEXT: {_ANY_TEXT}",
    r"rest: (?:call\d+|content)(?: \| (?:call\d+|content))*",
    rf'call\d+: {_CHANNEL} {_STRING} {_CONSTRAIN} "json" {_MESSAGE} arguments\d+',
    rf'content: {_CHANNEL} "final" {_MESSAGE} object',
    "",
)
_LINE = re.compile(rf"(?:arguments\d+|content|object): %json (?P<schema>\{{.*\}})|{'|'.join(_FORMS)}", re.ASCII)


def answer_part_of_limits(lark: str) -> float:
    """Return how large a grammar in Lark is that has only lines of the known forms, and plain schemas.

    It may be invalid.

    Returns:
        The size as a part of the largest plain schema. Above 1, the grammar is not plain.
    """
    if len(lark) > MAX_PLAIN_CHARS + MAX_PLAIN_SUBSCHEMAS * _OPTIONS_CHARS:
        return inf
    schemas: list[Any] = []
    for line in lark.split("\n"):
        match = _LINE.fullmatch(line)
        if match is None:
            return inf
        if match["schema"] is not None:
            schemas.append(_schema_without_options(match["schema"]))
    n_chars = len(lark) - len(schemas) * _OPTIONS_CHARS
    return max(n_chars / MAX_PLAIN_CHARS, part_of_limits(schemas))


def _schema_without_options(text: str) -> dict[str, Any] | None:
    """Return a schema inside a grammar. None: it has other options, or is not written as `json.dumps` writes it.

    Another text of the same value may mean something else to llguidance, for example if a key occurs twice.
    """
    try:
        schema = json.loads(text)
        is_usual = json.dumps(schema) == text
    except (ValueError, RecursionError):
        return None
    return schema if is_usual and schema.pop(_OPTIONS, None) == SCHEMA_OPTIONS else None
