"""Finding the texts of special tokens in what users write, so that a chat's content never acts as one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_NOTHING = re.compile(r"(?!)")


class Span(NamedTuple):
    """Characters `start` to `end` of a text."""

    start: int
    end: int


class SpecialTexts:
    """The texts of a model's special tokens, and where they, or parts of them, stand in a text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        self._lengths = sorted({len(text) for text in self.texts}, reverse=True)
        firsts = "".join(sorted({re.escape(text[0]) for text in self.texts}))
        self._first = re.compile(f"[{firsts}]") if firsts else _NOTHING
        self._heads = {text[:n] for text in self.texts for n in range(1, len(text))}
        self._tails = {text[n:] for text in self.texts for n in range(1, len(text))}

    def find(self, text: str) -> list[Span]:
        """Special texts in `text` from left to right, the longest where several begin; they do not overlap."""
        spans: list[Span] = []
        end = 0
        for match in self._first.finditer(text):
            start = match.start()
            if start < end:
                continue
            special = next((part for n in self._lengths if (part := text[start : start + n]) in self.texts), "")
            if special:
                end = start + len(special)
                spans.append(Span(start, end))
        return spans

    def find_at_borders(self, text: str) -> list[Span]:
        """Ends of `text` that could become part of a special text together with what a template puts around them.

        White space around `text` is passed over, because many templates trim it.
        """
        n_leading = len(text) - len(text.lstrip())
        core = text.strip()
        if not core:
            return []
        if any(core in special for special in self.texts):
            return [Span(n_leading, n_leading + len(core))]
        n_longest = self._lengths[0] if self._lengths else 0
        reach = range(min(n_longest, len(core)), 0, -1)
        n_tail = next((n for n in reach if core[:n] in self._tails), 0)
        n_head = next((n for n in reach if core[-n:] in self._heads), 0)
        end = n_leading + len(core)
        spans = [Span(n_leading, n_leading + n_tail), Span(max(end - n_head, n_leading + n_tail), end)]
        return [span for span in spans if span.start < span.end]


class Marks:
    """Texts taken out of message contents, and the marks that stand for them while the template renders."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.hides_special = False
        self._nonce = secrets.token_hex(8)
        self._pattern = re.compile(f"m{self._nonce}x([0-9]+)x")

    def put(self, content: str, spans: Sequence[Span]) -> str:
        """`content` with a mark in place of each span."""
        parts: list[str] = []
        end = 0
        for span in spans:
            parts += content[end : span.start], f"m{self._nonce}x{len(self.texts)}x"
            self.texts.append(content[span.start : span.end])
            end = span.end
        return "".join((*parts, content[end:]))

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """The rendered text as (text, whether it was taken out of a content)."""
        for index, part in enumerate(self._pattern.split(rendered)):
            is_content = index % 2 == 1
            yield (self.texts[int(part)] if is_content else part), is_content
