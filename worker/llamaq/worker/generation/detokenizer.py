"""From tokens to text that may be shown: whole characters, and nothing of a stop string.

What is released is a function of the tokens alone, however they come in.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Protocol


class Pieces(Protocol):
    """What a detokenizer needs of a vocabulary."""

    def piece(self, token: int) -> bytes:
        """The bytes of one token."""


class StreamDetokenizer:
    """One job's detokenizer; implements `jobs.Detokenizer`.

    The text ends at the first character that completes a stop string, and is cut where that one begins; of several that
    are complete at the same character, the longest counts. Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, vocab: Pieces, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._piece = vocab.piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._held = ""

    def feed(self, token: int) -> str:
        """The text that `token` releases, often none."""
        return self._release(self._utf8.decode(self._piece(token)))

    def finish(self) -> str:
        """What was held back, when the job ends without a stop string."""
        text = self._release(self._utf8.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        if self._matcher is None or self.stopped:
            return "" if self.stopped else text
        n_read, n_matched = self._matcher.read(text)
        if n_matched:
            self.stopped = True
            shown = (self._held + text[:n_read])[:-n_matched]
            self._held = ""
            return shown
        text = self._held + text
        n_shown = len(text) - self._matcher.n_open
        self._held = text[n_shown:]
        return text[:n_shown]


class StopMatcher:
    """Finds stop strings in a text that comes in parts: the automaton of Aho and Corasick (1975).

    A state is the longest end of the text so far that begins a stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._matched = [0]  # length of the longest stop string that ends in this state
        self._fallback = [0]  # the state of the next shorter end that begins a stop string
        self._state = 0
        for text in stop:
            self._add(text)
        self._link()

    @property
    def n_open(self) -> int:
        """How many of the last characters may still become a stop string."""
        return self._depth[self._state]

    def read(self, text: str) -> tuple[int, int]:
        """Read up to the first complete stop string: how many characters were read, and its length or 0."""
        for n_read, character in enumerate(text, 1):
            self._state = self._step(self._state, character)
            if self._matched[self._state]:
                return n_read, self._matched[self._state]
        return len(text), 0

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def _add(self, text: str) -> None:
        state = 0
        for character in text:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._matched.append(0)
                self._fallback.append(0)
            state = self._next[state][character]
        self._matched[state] = len(text)

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], character)
                self._matched[child] = max(self._matched[child], self._matched[self._fallback[child]])
                waiting.append(child)
