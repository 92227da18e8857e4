"""Finds tags in a text that arrives in pieces."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Sequence


class TagScanner:
    """Splits a text at tags. Text that may be the beginning of a tag is held back until this is known.

    Args:
        token_tags: The tags that are one token of the model's vocabulary. Such a tag is found only where its token
            begins. Every other tag is found by its text.
    """

    def __init__(self, token_tags: Collection[str] = ()) -> None:
        self._token_tags = token_tags
        self._held = ""
        self._start = 0
        """Number of characters of the text before `_held`."""
        self._tag_offsets: deque[int] = deque()
        """Positions in the text of the tokens that are tags, from `_held` on."""
        self.unmarked = 0
        """Where the text begins that `mark` marks next."""
        self.marked: list[tuple[int, int]] = []
        """The marked parts of the text: their first positions, and the positions after them."""

    def feed(self, text: str, tags: Sequence[str], tag_offsets: Sequence[int] = ()) -> tuple[str, str]:
        """Return the text before the first tag, and the tag, which is '' if there is none yet.

        The text after a tag is held back: call `feed("", tags)` again, with the tags that may follow, until the tag is
        ''.

        Args:
            text: The next piece of the text.
            tags: The tags to find.
            tag_offsets: Positions in the whole text, in characters, of further tokens that are tags. Their text may
                arrive later.
        """
        self._held += text
        self._tag_offsets.extend(each for each in tag_offsets if each >= self._start)
        place, tag = min(self._find_text(tags), self._find_token(tags))
        before = self._held[:place]
        self.unmarked = self._start
        self._drop(place + len(tag))
        return before, tag

    def finish(self) -> str:
        """Return the text that is still held back."""
        held = self._held
        self.unmarked = self._start
        self._drop(len(held))
        return held

    def mark(self, text: str) -> None:
        """Mark the text at `unmarked`. A further call marks the text after it."""
        start = self.unmarked
        self.unmarked += len(text)
        if self.marked and self.marked[-1][1] == start:
            start, _ = self.marked.pop()
        if start < self.unmarked:
            self.marked.append((start, self.unmarked))

    def _find_text(self, tags: Sequence[str]) -> tuple[int, str]:
        """Return the place of the first tag that is found by its text, and the tag.

        If there is no tag, the tag is ''. Then the place is where a possible tag begins, or the end of the text.
        """
        tags = [tag for tag in tags if tag not in self._token_tags]
        found = re.search("|".join(map(re.escape, tags)), self._held) if tags else None
        if found is not None:
            return found.start(), found.group()
        return len(self._held) - max((_n_overlap(self._held, tag) for tag in tags), default=0), ""

    def _find_token(self, tags: Sequence[str]) -> tuple[int, str]:
        """Return the place of the first tag that is found by its token, and the tag, as `_find_text` does."""
        for offset in self._tag_offsets:
            place = offset - self._start
            for tag in tags:
                if tag not in self._token_tags:
                    continue
                own = self._held[place : place + len(tag)]
                if own == tag:
                    return place, tag
                if tag.startswith(own):
                    return min(place, len(self._held)), ""
        return len(self._held), ""

    def _drop(self, n_chars: int) -> None:
        self._held = self._held[n_chars:]
        self._start += n_chars
        while self._tag_offsets and self._tag_offsets[0] < self._start:
            self._tag_offsets.popleft()


def _n_overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of the text that is a beginning of the tag, but not the whole tag."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
