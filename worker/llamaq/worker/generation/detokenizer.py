"""Turns tokens into text that can be streamed: whole characters, and no part of a stop string.

The released text depends on the tokens alone, not on how they are grouped.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from llamaq.worker.generation.indentation import IndentationCheck


class StreamDetokenizer:
    """The detokenizer of one job; implements `core.job_parts.Detokenizer`.

    The text ends before the stop string that is complete first. If several stop strings are complete at the same
    character, the longest one counts. Bytes that are not UTF-8 become U+FFFD.

    Args:
        piece: Returns the bytes of a token.
        stop: The stop strings.
        min_tokens: Nothing within this number of tokens ends the text.
        includes_stop: Whether the text ends after the stop string, and not before it.
        n_indent: The text ends before the first line that begins with fewer spaces and tabs. The first line, whose
            beginning is in the prompt, does not count. 0: no line ends it.
    """

    def __init__(
        self,
        piece: Callable[[int], bytes],
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        includes_stop: bool = False,
        n_indent: int = 0,
    ) -> None:
        self.may_end = bool(stop) or n_indent > 0
        self.has_ended = False
        self.stop_string: str | None = None
        self.tag_offset: int | None = None
        self._piece = piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._indentation = IndentationCheck(n_indent) if n_indent else None
        self._includes_stop = includes_stop
        self._min_tokens = min_tokens
        self._n_tokens = 0
        self._withheld = ""

    @property
    def withheld(self) -> str:
        """The text that `finish` would return now."""
        incomplete = self._utf8.getstate()[0]
        if self.has_ended or not incomplete:
            return self._withheld
        if self._can_end and self._indentation is not None and self._indentation.lacks_indentation:
            return self._withheld
        text = incomplete.decode(errors="replace")  # half of a surrogate pair becomes two characters
        if self._matcher is None or not self._can_end:
            return self._withheld + text
        n_read, stop = self._matcher.peek(text)
        return self._up_to(stop, self._withheld + text[:n_read])

    def feed(self, token: int) -> str:
        """Add a token, and return the text that can be released now. It is often empty."""
        self._n_tokens += 1
        return self._release(self._utf8.decode(self._piece(token)))

    def finish(self) -> str:
        """Return the withheld text, which is empty after the end of the text. Called at the end of the job."""
        text = self._release(self._utf8.decode(b"", final=True)) + self._withheld
        self._withheld = ""
        return text

    def _release(self, text: str) -> str:
        if self.has_ended:
            return ""
        place = None if self._indentation is None else self._indentation.read(text, may_end=self._can_end)
        text, self.has_ended = text[:place], place is not None
        if self._matcher is None:
            return text
        n_read, stop = self._matcher.read(text) if self._can_end else self._matcher.skip(text)
        if stop:
            read, self._withheld = self._withheld + text[:n_read], ""
            self.stop_string, self.has_ended = stop, True
            return self._up_to(stop, read)
        if self.has_ended:
            read, self._withheld = self._withheld + text, ""
            return read
        text = self._withheld + text
        n_released = len(text) if self._includes_stop else len(text) - self._matcher.n_partial_chars
        self._withheld = text[n_released:]
        return text[:n_released]

    @property
    def _can_end(self) -> bool:
        """Whether what the last token completes may end the text."""
        return self._n_tokens > self._min_tokens

    def _up_to(self, stop: str, text: str) -> str:
        """Return a text up to the stop string at its end, or with it. `stop` is empty if there is none."""
        return text if self._includes_stop else text[: len(text) - len(stop)]


class TagDetokenizer(StreamDetokenizer):
    """A detokenizer that also tells where in the text the tokens begin that are tags, such as `<tool_call>`.

    A text that spells a tag with other tokens has no offset. So a reader can tell it from the tag.

    Args:
        piece: Returns the bytes of a token.
        stop: The stop strings.
        tag_lengths: Maps each token that is a tag to the number of characters of its text.
        min_tokens: See `StreamDetokenizer`.
        includes_stop: See `StreamDetokenizer`.
        n_indent: See `StreamDetokenizer`.
    """

    def __init__(
        self,
        piece: Callable[[int], bytes],
        stop: Sequence[str],
        tag_lengths: Mapping[int, int],
        *,
        min_tokens: int = 0,
        includes_stop: bool = False,
        n_indent: int = 0,
    ) -> None:
        super().__init__(piece, stop, min_tokens=min_tokens, includes_stop=includes_stop, n_indent=n_indent)
        self._tag_lengths = tag_lengths
        self._n_chars = 0
        """Number of characters of the tokens so far, with those that are withheld."""

    def feed(self, token: int) -> str:
        """Add a token, and return the text that can be released now. Sets `tag_offset`."""
        self._n_tokens += 1
        text = self._utf8.decode(self._piece(token))
        self._n_chars += len(text)
        length = self._tag_lengths.get(token)
        self.tag_offset = None if length is None else self._n_chars - length
        return self._release(text)


class StopMatcher:
    """Finds stop strings in a text that is read in parts, with the automaton of Aho and Corasick (1975).

    A state represents the longest suffix of the text that is a prefix of a stop string.

    Args:
        stop: The stop strings, none of them empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # for each state: the next state by character
        self._depth = [0]  # for each state: length of its suffix
        self._matched = [""]  # for each state: the longest stop string that ends there, or an empty text
        self._fallback = [0]  # for each state: the state of the next shorter suffix
        self._state = 0
        for text in stop:
            self._add(text)
        self._link_fallbacks()

    @property
    def n_partial_chars(self) -> int:
        """Number of characters at the end of the text that may be the start of a stop string."""
        return self._depth[self._state]

    def read(self, text: str) -> tuple[int, str]:
        """Read `text` up to its end, or up to the end of the first complete stop string.

        Returns:
            The number of characters read, and the complete stop string, or an empty text if none is complete.
        """
        for n_read, character in enumerate(text, 1):
            self._state = self._step(self._state, character)
            if self._matched[self._state]:
                return n_read, self._matched[self._state]
        return len(text), ""

    def skip(self, text: str) -> tuple[int, str]:
        """Read `text` up to its end, and ignore the stop strings that are complete in it. Returns the same as `read`.

        A stop string that begins in this text can still be complete in the next one.
        """
        for character in text:
            self._state = self._step(self._state, character)
        return len(text), ""

    def peek(self, text: str) -> tuple[int, str]:
        """Return what `read` would return for this text, without reading it."""
        state = self._state
        found = self.read(text)
        self._state = state
        return found

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
                self._matched.append("")
                self._fallback.append(0)
            state = self._next[state][character]
        self._matched[state] = text

    def _link_fallbacks(self) -> None:
        pending = deque(self._next[0].values())
        while pending:
            state = pending.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], character)
                self._matched[child] = self._matched[child] or self._matched[self._fallback[child]]
                pending.append(child)
