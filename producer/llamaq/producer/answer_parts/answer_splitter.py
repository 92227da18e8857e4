"""What every splitter does, and the splitters of an answer without parts and of one that may have one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Part


class AnswerSplitter(Protocol):
    """Splits one answer into its parts."""

    def feed(self, text: str, tag_offsets: Sequence[int] = ()) -> list[Part]:
        """Return the parts that a further piece of the answer completes.

        Args:
            text: The piece.
            tag_offsets: Positions in the whole answer, in characters, of the tokens that are tags and begin there.
        """

    def finish(self) -> list[Part]:
        """Return the last parts, at the end of the answer."""

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """The places of the reasoning so far: the positions of its first characters, and those after its last ones."""


class ContentSplitter:
    """Returns the whole answer as content."""

    def feed(self, text: str, tag_offsets: Sequence[int] = ()) -> list[Part]:  # noqa: ARG002 - it has no tags
        """See `AnswerSplitter`."""
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        """See `AnswerSplitter`."""
        return []

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """See `AnswerSplitter`."""
        return ()


class FirstCall:
    """Splits one answer with another splitter, and leaves out the calls after the first one."""

    def __init__(self, splitter: AnswerSplitter) -> None:
        self._splitter = splitter

    def feed(self, text: str, tag_offsets: Sequence[int] = ()) -> list[Part]:
        """See `AnswerSplitter`."""
        return _without_later_calls(self._splitter.feed(text, tag_offsets))

    def finish(self) -> list[Part]:
        """See `AnswerSplitter`."""
        return _without_later_calls(self._splitter.finish())

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """See `AnswerSplitter`."""
        return self._splitter.reasoning_spans


def _without_later_calls(parts: Iterable[Part]) -> list[Part]:
    return [part for part in parts if not (isinstance(part, CallStarted | CallArguments) and part.index)]
