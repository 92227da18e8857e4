"""Finds tags in a text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence


class TagScanner:
    """Splits a text at tags. The beginning of a possible tag is held back until it is clear whether it is one."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str, tags: Sequence[str]) -> tuple[str, str]:
        """Return the text before the first tag, and the tag, which is '' if there is none yet.

        What follows a tag stays held: call `feed("", tags)` again, with the tags that may follow, until the tag is ''.
        """
        self._held += text
        found = re.search("|".join(map(re.escape, tags)), self._held) if tags else None
        if found is not None:
            before, self._held = self._held[: found.start()], self._held[found.end() :]
            return before, found.group()
        n_partial = max((_n_overlap(self._held, tag) for tag in tags), default=0)
        released = self._held[: len(self._held) - n_partial]
        self._held = self._held[len(released) :]
        return released, ""

    def finish(self) -> str:
        """Return the text that is still held back."""
        held, self._held = self._held, ""
        return held


def _n_overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of the text that is a beginning of the tag, but not the whole tag."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
