"""Splits answers in the harmony format of gpt-oss, in which an answer is a list of messages in channels.

`<|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>`. A call is a
message in the channel `commentary` whose header has a recipient: ` to=functions.NAME <|constrain|>json`.
"""

from __future__ import annotations

import re

from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Part, Reasoning
from llamaq.producer.answer_parts.tag_scanner import TagScanner

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[^\s<]+)")


class HarmonySplitter:
    """Splits one answer. Its text must have the control tokens."""

    def __init__(self) -> None:
        self._scanner = TagScanner()
        self._header: str | None = ""
        """The header of the present message. None: its text is being read."""
        self._is_reasoning = False
        self._n_calls = 0
        self._is_call = False

    def feed(self, text: str) -> list[Part]:
        """Return the parts that a further piece of the answer completes."""
        parts: list[Part] = []
        while True:
            before, tag = self._scanner.feed(text, (MESSAGE, *ENDS))
            text = ""
            parts += self._take(before)
            if not tag:
                return parts
            if tag == MESSAGE and self._header is not None:
                parts += self._open_message(self._header)
            elif tag in ENDS:
                self._header, self._is_call = "", False

    def finish(self) -> list[Part]:
        """Return the last parts."""
        return self._take(self._scanner.finish())

    def _open_message(self, header: str) -> list[Part]:
        self._header = None
        recipient = _RECIPIENT.search(header)
        self._is_reasoning = "analysis" in header and recipient is None
        self._is_call = recipient is not None
        if recipient is None:
            return []
        self._n_calls += 1
        return [CallStarted(self._n_calls - 1, recipient["name"])]

    def _take(self, text: str) -> list[Part]:
        if self._header is not None:
            self._header += text
            return []
        if not text:
            return []
        if self._is_call:
            return [CallArguments(self._n_calls - 1, text)]
        return [Reasoning(text) if self._is_reasoning else Content(text)]
