"""Reads the JSON object of a tool call while it arrives, so that its arguments can be streamed.

`from_json` refuses half a surrogate pair, which the standard library accepts: no answer can be encoded with it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Part

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""The beginning of a call whose name comes before its arguments, an object."""


class JsonValueReader:
    """Reads one JSON object, and tells where it ends."""

    def __init__(self) -> None:
        self._depth = 0
        self.in_string = False
        self._is_escaped = False
        self.has_ended = False

    def read(self, text: str) -> int:
        """Return how many characters of the text belong to the object."""
        for place, character in enumerate(text):
            if self.has_ended:
                return place
            self._step(character)
        return len(text)

    def _step(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self.in_string:
            self._is_escaped = character == "\\"
            self.in_string = character != '"'
        elif character == '"':
            self.in_string = self._depth > 0
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.has_ended = self._depth <= 0


class JsonCall:
    """One call in the form `{"name": NAME, "arguments": OBJECT}`, also with `parameters`.

    Args:
        index: Number of the call in the answer.
        needs_arguments: Whether an object without arguments is content. Otherwise it is a call without arguments.
    """

    def __init__(self, index: int, *, needs_arguments: bool = False) -> None:
        self._index = index
        self._needs_arguments = needs_arguments
        self.text = ""
        """The text of a call that was not streamed."""
        self._arguments: JsonValueReader | None = None
        self._whole = JsonValueReader()

    @property
    def has_ended(self) -> bool:
        """Whether the object is complete."""
        return self._whole.has_ended

    def can_contain(self, _: str) -> bool:
        """Whether a tag at this place is text of the call: in JSON, a tag can only be part of a string."""
        return self._whole.in_string

    def feed(self, text: str) -> tuple[list[Part], str]:
        """Return the parts that the text completed, and the text after the object."""
        n_own = self._whole.read(text)
        own, rest = text[:n_own], text[n_own:]
        if self._arguments is not None:
            return self._stream(self._arguments, own), rest
        self.text += own
        head = _HEAD.match(self.text)
        if head is None:
            return [], rest
        try:
            name = from_json(head["name"])
        except ValueError:  # no JSON text, so that the whole object is no call
            return [], rest
        self._arguments = JsonValueReader()
        return [CallStarted(self._index, name), *self._stream(self._arguments, self.text[head.end() :])], rest

    def finish(self) -> list[Part] | None:
        """Return the parts of a call that was not streamed, because its fields have another order.

        Returns:
            None if this is no call: the buffered text is content.
        """
        if self._arguments is not None:
            return []
        try:
            value = from_json(self.text, allow_inf_nan=False)
            parts = parts_of_call(self._index, value)
        except ValueError:
            return None
        if parts and self._needs_arguments and value.keys().isdisjoint(("arguments", "parameters")):
            return None
        return parts

    def _stream(self, arguments: JsonValueReader, text: str) -> list[Part]:
        n_own = arguments.read(text)
        return [CallArguments(self._index, text[:n_own])] if n_own else []


def parts_of_call(index: int, value: Any) -> list[Part] | None:
    """Return the parts of a call from an object with a name and arguments. None: the value is no such object.

    Raises:
        ValueError: JSON does not have a number.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters")) or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return [CallStarted(index, value["name"]), CallArguments(index, text)]
