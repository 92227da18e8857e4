"""Finds the texts of special tokens in chat messages, so that message content never becomes a special token."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from llamaq.common.errors import ErrorCode, JobRejected

_NEVER_MATCHES = re.compile(r"(?!)")


class Span(NamedTuple):
    """The characters [start, end) of a text."""

    start: int
    end: int


class SpecialTokenFinder:
    """Finds the texts of a model's special tokens in other texts.

    Args:
        texts: The texts of the special tokens, such as `<|im_end|>`. Empty texts are ignored.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        self._joined = "\n".join(self.texts)  # one search finds a text that is a part of any special text
        self._lengths = sorted({len(text) for text in self.texts}, reverse=True)
        first_characters = "".join(sorted({re.escape(text[0]) for text in self.texts}))
        self._first_character = re.compile(f"[{first_characters}]") if first_characters else _NEVER_MATCHES
        self._proper_prefixes = {text[:n] for text in self.texts for n in range(1, len(text))}
        self._proper_suffixes = {text[n:] for text in self.texts for n in range(1, len(text))}

    def find(self, text: str) -> list[Span]:
        """Return the special texts in `text`, from left to right and without overlap.

        If several special texts start at the same character, only the longest is returned.
        """
        spans: list[Span] = []
        end = 0
        for match in self._first_character.finditer(text):
            start = match.start()
            if start < end:
                continue
            special = next((part for n in self._lengths if (part := text[start : start + n]) in self.texts), "")
            if special:
                end = start + len(special)
                spans.append(Span(start, end))
        return spans

    def find_at_edges(self, text: str) -> list[Span]:
        """Return the parts at both ends of `text` that the surrounding text could complete to a special text.

        White space around `text` is ignored, because many chat templates remove it.
        """
        n_leading = len(text) - len(text.lstrip())
        core = text.strip()
        if not core:
            return []
        if core in self._joined:
            return [Span(n_leading, n_leading + len(core))]
        n_longest = self._lengths[0] if self._lengths else 0
        lengths = range(min(n_longest, len(core)), 0, -1)
        n_suffix = next((n for n in lengths if core[:n] in self._proper_suffixes), 0)
        n_prefix = next((n for n in lengths if core[-n:] in self._proper_prefixes), 0)
        end = n_leading + len(core)
        spans = [Span(n_leading, n_leading + n_suffix), Span(max(end - n_prefix, n_leading + n_suffix), end)]
        return [span for span in spans if span.start < span.end]


class Placeholders:
    """Replaces parts of message contents by random words while the chat template renders the messages."""

    def __init__(self) -> None:
        self.originals: list[str] = []
        """The replaced parts. The number in a placeholder is the index of its part in this list."""
        self._nonce = secrets.token_hex(12)
        # A template may change the case of a content. A special token's text keeps its own case then.
        self._pattern = re.compile(f"m{self._nonce}x([0-9]+)x", re.IGNORECASE)
        self._halves = self._nonce[:12], self._nonce[12:]

    def replace(self, content: str, spans: Sequence[Span]) -> str:
        """Return `content` with a placeholder in place of each span."""
        parts: list[str] = []
        end = 0
        for span in spans:
            parts += content[end : span.start], f"m{self._nonce}x{len(self.originals)}x"
            self.originals.append(content[span.start : span.end])
            end = span.end
        return "".join((*parts, content[end:]))

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Split a rendered chat at its placeholders.

        Yields:
            A part of the text, and whether it is a replaced part of a content. Joined, the parts are the rendered chat
            without placeholders.

        Raises:
            JobRejected: The template took a placeholder apart.
        """
        for index, part in enumerate(self._pattern.split(rendered)):
            is_content = index % 2 == 1
            if not is_content and any(half in part.lower() for half in self._halves):
                reason = "the model's chat template cuts a content inside the text of a special token"
                raise JobRejected(ErrorCode.CHAT_TEMPLATE, reason)
            yield (self.originals[int(part)] if is_content else part), is_content

    def restore(self, rendered: str) -> str:
        """Return a rendered chat with the replaced parts in place of the placeholders. Raises: as in `split`."""
        return "".join(text for text, _ in self.split(rendered))
