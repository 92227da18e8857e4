"""Leaves out all calls of an answer but the first one, for requests that allow one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Part

if TYPE_CHECKING:
    from llamaq.producer.answer_parts.answer_format import AnswerSplitter


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
