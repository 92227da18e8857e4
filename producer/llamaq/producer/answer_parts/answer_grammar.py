"""Grammars for answers with reasoning, tool calls and constrained content.

If a job requires a call, or content that matches a JSON schema, they also allow the reasoning before it, and a call in
place of the content.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.common.json_schema.closed_objects import close_objects
from llamaq.common.json_schema.rewriting import SCHEMA_OPTIONS, rewrite_schema
from llamaq.common.protocol.answer_tags import CALL_CLOSE, CALL_OPEN, MISTRAL_CALLS
from llamaq.common.protocol.output_params import MAX_GRAMMAR_BYTES
from llamaq.producer.answer_parts.answer_format import AnswerForm, AnswerFormat
from llamaq.producer.answer_parts.harmony_splitter import NAME

_ARGUMENTS = {AnswerFormat.LLAMA3: "parameters"}
"""The name of the arguments in the object of a call, where it is not `arguments`."""


def answer_grammar(
    form: AnswerForm, tools: Sequence[dict[str, Any]], schema: dict[str, Any] | None = None, *, parallel: bool = True
) -> str:
    """Return a Lark grammar of llguidance for answers that call tools, or whose content matches a schema.

    Args:
        form: The form of the answer.
        tools: The tools that may be called, in the form of the OpenAI API. Empty: none.
        schema: JSON schema of the content. None: the answer is a call.
        parallel: Whether several calls are allowed.

    Raises:
        InvalidRequest: A schema is too large, or has a keyword that is not supported.
    """
    if form.format is AnswerFormat.HARMONY:
        return _harmony_grammar(tools, schema, starts_in_reasoning=form.starts_in_reasoning)
    ends = [*(["calls"] if tools else []), *([] if schema is None else ["content"])]
    rules = [*_reasoning(form, " | ".join(ends))]
    if tools:
        rules += _calls(form, tools, parallel=parallel, has_content=schema is not None)
    if schema is not None:
        rules.append(f"content: {_json(schema)}")
    return "\n".join(rules)


def _reasoning(form: AnswerForm, rest: str) -> list[str]:
    """Return the first rules of a grammar: reasoning, if there may be any, and the rest."""
    if not form.reasoning_open or form.has_reasoned:
        return [f"start: {rest}"]
    reasoning = "reasoning" if form.starts_in_reasoning else f"({_tag(form, form.reasoning_open)} reasoning)?"
    if form.reasoning_close in form.tag_tokens:
        body = f"reasoning: /(.|\\n)*/ {_tag(form, form.reasoning_close)}"
    else:
        body = f"reasoning[suffix={json.dumps(form.reasoning_close)}]: /(.|\\n)*/"
    return [f"start: {reasoning} SPACE? ({rest})", body, "SPACE: /[ \\n]{1,4}/"]


def _tag(form: AnswerForm, tag: str) -> str:
    """Return a tag as a term of the grammar: its token, or its text if the model has no token for it."""
    return f"<[{form.tag_tokens[tag]}]>" if tag in form.tag_tokens else json.dumps(tag)


def _calls(form: AnswerForm, tools: Sequence[dict[str, Any]], *, parallel: bool, has_content: bool) -> list[str]:
    is_tagged = form.format not in (AnswerFormat.LLAMA3, AnswerFormat.JSON)
    objects = _objects(form.format, tools, is_split=has_content and not is_tagged)
    match form.format:
        case AnswerFormat.HERMES | AnswerFormat.XML | AnswerFormat.GLM:
            more = ' ("\\n" call)*' if parallel else ""
            call = f'call: {_tag(form, CALL_OPEN)} "\\n" object "\\n" {_tag(form, CALL_CLOSE)}'
            return [f"calls: call{more}", call, *objects]
        case AnswerFormat.MISTRAL:
            more = "(/, ?/ object)*" if parallel else ""
            return [f'calls: {_tag(form, MISTRAL_CALLS)} "[" object {more} "]"', *objects]
    return ["calls: object", *objects]


def _objects(answer_format: AnswerFormat, tools: Sequence[dict[str, Any]], *, is_split: bool) -> list[str]:
    """Return the rule `object`: an object with the name of a tool, and arguments that match its schema.

    Each schema is a grammar of its own, so that its references find their definitions. Where content may begin like a
    call, the opening `is_split` into the terminals of a schema: a longer one would exclude content.
    """
    key = json.dumps(_ARGUMENTS.get(answer_format, "arguments"))
    rules = [f"object: {' | '.join(f'object{number}' for number in range(len(tools)))}"]
    for number, (name, parameters) in enumerate(map(_function, tools)):
        texts = ["{", '"name"', ":", " ", json.dumps(name, ensure_ascii=False), ",", " ", key, ":", " "]
        terminals = texts if is_split else ["".join(texts)]
        opening = " ".join('" "?' if one == " " else json.dumps(one, ensure_ascii=False) for one in terminals)
        rules.append(f'object{number}: {opening} arguments{number} "}}"')
        rules.append(f"arguments{number}: {_json(parameters, is_closed=True)}")
    return rules


def _harmony_grammar(
    tools: Sequence[dict[str, Any]], schema: dict[str, Any] | None, *, starts_in_reasoning: bool
) -> str:
    """Return a grammar for reasoning in the channel `analysis`, which may be left out, and one call or the content.

    Raises:
        InvalidRequest: The header of a call cannot contain the name of a tool.
    """
    for number, tool in enumerate(tools):
        if not NAME.fullmatch(tool["function"]["name"]):
            raise InvalidRequest(f"tools.{number}: this model's calls need a name without white space and `<`")
    names = [f"call{number}" for number in range(len(tools))]
    rules = [
        f"call{number}: <|channel|> {json.dumps(f'commentary to=functions.{name} ', ensure_ascii=False)} "
        f'<|constrain|> "json" <|message|> arguments{number}\n'
        f"arguments{number}: {_json(parameters, is_closed=True)}\n"
        for number, (name, parameters) in enumerate(map(_function, tools))
    ]
    if schema is not None:
        names.append("content")
        rules.append(f'content: <|channel|> "final" <|message|> object\nobject: {_json(schema)}\n')
    rest_of_reasoning = 'TEXT <|end|> <|start|> "assistant"'
    whole = f'(<|channel|> "analysis" <|message|> {rest_of_reasoning})?'
    start = f"start: {rest_of_reasoning if starts_in_reasoning else whole} rest\nTEXT: /(.|\\n)*/\n"
    return f"{start}rest: {' | '.join(names)}\n{''.join(rules)}"


def _json(schema: dict[str, Any], *, is_closed: bool = False) -> str:
    if len(json.dumps(schema)) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"a JSON schema is larger than {MAX_GRAMMAR_BYTES} bytes")
    try:
        rewritten = rewrite_schema(schema)
        if is_closed:
            close_objects(rewritten)
        return f"%json {json.dumps({**rewritten, 'x-guidance': SCHEMA_OPTIONS})}"
    except ValueError as exc:
        raise InvalidRequest(f"a JSON schema cannot be used: {exc}") from exc


def _function(tool: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    function = tool["function"]
    return function["name"], function.get("parameters") or {"type": "object"}
