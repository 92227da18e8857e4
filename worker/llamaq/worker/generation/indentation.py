"""Ends a text at the first line that is indented less than required, for completions within code."""

from __future__ import annotations

INDENTATION = " \t"


class IndentationCheck:
    """Finds the first line after the first one that begins with too few spaces and tabs, in a text read in parts.

    An empty line begins with none. Source: `n_indent` of llama-server.

    Args:
        n_indent: Number of spaces and tabs that are required, at least 1.
    """

    def __init__(self, n_indent: int) -> None:
        self._n_indent = n_indent
        self._n_leading: int | None = None
        """Spaces and tabs of the current line, if the text has nothing else of this line. None: it has, or it is the
        first line, whose beginning is not part of the text."""

    @property
    def lacks_indentation(self) -> bool:
        """Whether any further character but a space or a tab would be on a line with too few of them."""
        return self._n_leading is not None and self._n_leading < self._n_indent

    def read(self, text: str, *, may_end: bool = True) -> int | None:
        """Read the next part of the text.

        Args:
            text: The part.
            may_end: Whether a line with too few spaces and tabs ends the text.

        Returns:
            The place of the first character after too few spaces and tabs. None: all lines have enough so far.
        """
        for place, character in enumerate(text):
            if self._n_leading is not None and character in INDENTATION:
                self._n_leading += 1
                continue
            if self.lacks_indentation and may_end:
                return place
            self._n_leading = 0 if character == "\n" else None
        return None
