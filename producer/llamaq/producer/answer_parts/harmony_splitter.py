"""Splits answers in the harmony format of gpt-oss, in which an answer is a list of messages in channels.

`<|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>`. A call is a
message in the channel `commentary` whose header has a recipient: ` to=functions.NAME <|constrain|>json`.

An answer that begins neither with a tag nor with a recipient has no header there: its text is content.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from llamaq.common.protocol.answer_tags import CALL, CHANNEL, END, MESSAGE, RETURN, START
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Part, Reasoning
from llamaq.producer.answer_parts.tag_scanner import TagScanner

ENDS = (END, CALL, RETURN, START)
RECIPIENT = "to="
NAME = re.compile(r"[^\s<]+")
"""The names of tools that the header of a call can contain."""
_RECIPIENT = re.compile(rf"{RECIPIENT}(?:functions\.)?(?P<name>{NAME.pattern})")


class HarmonySplitter:
    """Splits one answer. Its text must have the control tokens.

    Args:
        token_tags: The tags that are one token of the model's vocabulary.
        starts_in_reasoning: Whether the prompt has begun a message of reasoning.
    """

    def __init__(self, token_tags: Collection[str] = (), *, starts_in_reasoning: bool = False) -> None:
        self._scanner = TagScanner(token_tags)
        self._header: str | None = None if starts_in_reasoning else ""
        """The header of the current message. None: the text of the message is being read."""
        self._has_tags = False
        """Whether the answer has a tag."""
        self._is_reasoning = starts_in_reasoning
        self._n_calls = 0
        self._is_call = False

    def feed(self, text: str, tag_offsets: Sequence[int] = ()) -> list[Part]:
        """Return the parts that a further piece of the answer completes."""
        parts: list[Part] = []
        while True:
            before, tag = self._scanner.feed(text, (CHANNEL, MESSAGE, *ENDS), tag_offsets)
            text, tag_offsets = "", ()
            parts += self._take(before)
            if not tag:
                return parts
            self._has_tags = True
            if tag in ENDS:
                self._header = ""
            elif tag == MESSAGE and self._header is not None:
                parts += self._open_message(self._header)
            else:
                parts += self._take(tag)

    def finish(self) -> list[Part]:
        """Return the last parts."""
        parts = self._take(self._scanner.finish())
        if self._header and not self._has_tags:
            parts.append(Content(self._header))
        return parts

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """The places of the reasoning."""
        return self._scanner.marked

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
            if self._has_tags or _may_begin_header(self._header):
                return []
            text, self._header = self._header, None
        if not text:
            return []
        if self._is_call:
            return [CallArguments(self._n_calls - 1, text)]
        if not self._is_reasoning:
            return [Content(text)]
        self._scanner.mark(text)
        return [Reasoning(text)]


def _may_begin_header(text: str) -> bool:
    """Return whether an answer may begin with this text as the header of its first message, before the first tag."""
    return RECIPIENT.startswith(text.lstrip()[: len(RECIPIENT)])
