"""Reads a tool call in the formats of Qwen3-Coder, Qwen3.5 and GLM-4.5, which write parameters between tags.

`<function=NAME>`, then for each parameter `<parameter=KEY>VALUE</parameter>`, then `</function>`. By the schema
of the tool, the value is a text or JSON. The arguments are known at the end of the call.

Without `</parameter>`, a value ends before a line that begins with `<parameter=KEY>`, or before the last `</function>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from llamaq.common.protocol.answer_tags import CALL_CLOSE
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Part

OPEN = "<function="
CLOSE = "</function>"
HEAD = re.compile(r"<function=[^<>\n]{0,99}(?:\Z|>\s{0,9}(?:\Z|</?(?:\Z|[fp])))")
"""The beginning of a call, which may be incomplete."""
_LITERALS = {"null": None, "True": True, "False": False}
"""Chat templates write booleans as Python does."""

ParameterNames = Mapping[str, Sequence[str]]
"""Maps the name of a tool to some of its parameters."""


class XmlCall:
    """One call of Qwen3-Coder.

    Args:
        index: Number of the call in the answer.
        text_parameters: The parameters of all tools whose values are texts.
        literal_parameters: Those of them that may be `null`, and booleans.
    """

    _CLOSE = CLOSE
    _VALUE_CLOSE = "</parameter>"
    _TAG = re.compile(r"<parameter=|</parameter>|</function>")
    _NAME = re.compile(r"\s*<function=(?P<name>[^>\n]+)>")
    _PARAMETER = re.compile(
        r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)(?:\n?</parameter>|(?=\n<parameter=[^<>\n]+>))", re.DOTALL
    )

    def __init__(self, index: int, text_parameters: ParameterNames, literal_parameters: ParameterNames) -> None:
        self._index = index
        self._text_parameters = text_parameters
        self._literal_parameters = literal_parameters
        self._pieces: list[str] = []
        self._last = ""
        """The last characters: a tag may begin in them."""
        self._is_in_value = False
        self._is_told = False
        self.is_closed = False
        """Whether a tag has ended the call."""
        self.has_ended = False

    @property
    def text(self) -> str:
        """The text of the call so far."""
        return "".join(self._pieces)

    def can_contain(self, _: str) -> bool:
        """Whether a tag that comes next is text of the call: the value of a parameter may contain it."""
        return self._is_in_value and not self.text.rstrip().endswith(CLOSE)

    def feed(self, text: str) -> tuple[list[Part], str]:
        """Return the parts that the text completed, and the text after the call."""
        if self.has_ended:
            return [], text
        n_before, searched = len(self._last), self._last + text
        for tag in self._TAG.finditer(searched):
            if tag[0] != self._CLOSE:
                self._is_in_value = tag[0] != self._VALUE_CLOSE
            elif not self._is_in_value:  # a value may contain this tag
                end = tag.end() - n_before
                self._pieces.append(text[:end])
                self.has_ended = True
                parts = self._read()
                self._is_told = parts is not None
                return parts or [], text[end:]
        self._pieces.append(text)
        self._last = searched[1 - len(self._VALUE_CLOSE) :]
        return [], ""

    def finish(self) -> list[Part] | None:
        """Return the parts of a call that was cut off. None: this is no call."""
        return [] if self._is_told else self._read()

    def _read(self) -> list[Part] | None:
        text = self.text
        found = self._NAME.match(f"{text}<" if self.is_closed else text)
        if found is None:
            return None
        name = found["name"].strip()
        if self.is_closed and self._is_in_value:
            text = text.rstrip().removesuffix(self._CLOSE) + self._VALUE_CLOSE
        end = text.rfind(self._VALUE_CLOSE) + len(self._VALUE_CLOSE)  # each search after it would read the whole text
        arguments = {
            (key := match["key"].strip()): self._value_of(name, key, match["value"])
            for match in self._PARAMETER.finditer(text, found.end(), end)
        }
        return [CallStarted(self._index, name), CallArguments(self._index, json.dumps(arguments, ensure_ascii=False))]

    def _value_of(self, name: str, key: str, text: str) -> Any:
        is_text = key in self._text_parameters.get(name, ())
        if is_text == (text == "null") and text in _LITERALS and key in self._literal_parameters.get(name, ()):
            return _LITERALS[text]
        if is_text:
            return text
        try:
            value = from_json(text, allow_inf_nan=False)
            json.dumps(value, allow_nan=False)  # 1e999 becomes infinite
        except ValueError:
            return text
        return value


class GlmCall(XmlCall):
    """One call of GLM-4.5: the name, then for each parameter `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`."""

    _CLOSE = ""
    _VALUE_CLOSE = "</arg_value>"
    _TAG = re.compile("</?arg_value>")
    _NAME = re.compile(r"\s*(?P<name>[^\s<>{]+)\s*(?=<arg_key>|<\Z)")
    _PARAMETER = re.compile(r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL)

    def can_contain(self, tag: str) -> bool:
        """Whether a tag is text of the call: models leave out `</arg_value>` only at the end of the call."""
        return self._is_in_value and tag != CALL_CLOSE


TEXTS = {"string"}, {"string", "null"}
LITERALS = {"string", "null"}, {"boolean"}, {"boolean", "null"}


def parameters_of(tools: Sequence[Mapping[str, Any]], types: Sequence[set[str]]) -> dict[str, tuple[str, ...]]:
    """Return the parameters with one of these sets of types, for tools in the form of the OpenAI API."""
    found = {}
    for tool in tools:
        function = tool.get("function") or {}
        properties = (function.get("parameters") or {}).get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        if names := tuple(key for key, schema in properties.items() if _types_of(schema) in types):
            found[str(function.get("name"))] = names
    return found


def _types_of(schema: Any) -> set[str]:
    """Return the types that a schema allows, with "" for an unknown one."""
    match schema:
        case {"type": str() as name}:
            return {name}
        case {"type": [*names]}:
            return set(map(str, names))
        case {"anyOf": [*options]} | {"oneOf": [*options]}:
            return {name for option in options for name in _types_of(option)}
        case {"enum": [*options]}:
            return {"null" if option is None else "string" if isinstance(option, str) else "" for option in options}
    return {""}
