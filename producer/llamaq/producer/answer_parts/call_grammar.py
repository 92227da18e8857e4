"""Grammars that constrain an answer to tool calls, for a request whose `tool_choice` demands one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llamaq.producer.answer_parts.answer_format import AnswerFormat


def call_grammar(answer_format: AnswerFormat, tools: Sequence[dict[str, Any]], *, parallel: bool = True) -> str:
    """Return a Lark grammar of llguidance for an answer that consists of tool calls, in the format of the model.

    Args:
        answer_format: The format.
        tools: The tools that may be called, in the form of the OpenAI API.
        parallel: Whether several calls are allowed.
    """
    many = "+" if parallel else ""
    match answer_format:
        case AnswerFormat.HERMES:
            call = 'call: "<tool_call>\\n" object "\\n</tool_call>"'
            return f'start: (call "\\n"?){many}\n{call}\n{_objects(tools, "arguments")}'
        case AnswerFormat.MISTRAL:
            more = '("," object)*' if parallel else ""
            return f'start: "[TOOL_CALLS][" object {more} "]"\n{_objects(tools, "arguments")}'
        case AnswerFormat.HARMONY:
            return _harmony_grammar(tools)
        case AnswerFormat.LLAMA3:
            return f"start: object\n{_objects(tools, 'parameters')}"
        case AnswerFormat.JSON:
            return f"start: object\n{_objects(tools, 'arguments')}"


def _objects(tools: Sequence[dict[str, Any]], arguments: str) -> str:
    """Return the rule `object`: an object with the name of a tool and arguments that match its schema."""
    schemas = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: parameters},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for name, parameters in map(_function, tools)
    ]
    return f"object: %json {json.dumps(schemas[0] if len(schemas) == 1 else {'anyOf': schemas})}\n"


def _harmony_grammar(tools: Sequence[dict[str, Any]]) -> str:
    """Return a grammar for reasoning in the channel `analysis`, which may be left out, and one call."""
    names = [f"call{number}" for number in range(len(tools))]
    rules = [
        f'{rule}: <|channel|> "commentary to=functions.{name} " <|constrain|> "json" <|message|> arguments{number}\n'
        f"arguments{number}: %json {json.dumps(parameters)}\n"
        for number, (rule, (name, parameters)) in enumerate(zip(names, map(_function, tools), strict=True))
    ]
    start = 'start: (<|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant")? call\nTEXT: /(.|\\n)*/\n'
    return f"{start}call: {' | '.join(names)}\n{''.join(rules)}"


def _function(tool: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    function = tool["function"]
    return function["name"], function.get("parameters") or {"type": "object"}
