"""The splitter of an answer that is content alone."""

from __future__ import annotations

from collections.abc import Sequence

from llamaq.producer.answer_parts.parts import Content, Part


class ContentSplitter:
    """Returns the whole answer as content."""

    def feed(self, text: str, tag_offsets: Sequence[int] = ()) -> list[Part]:  # noqa: ARG002 - it has no tags
        """Return a further piece of the answer as a part."""
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        """Return no part: the answer is complete."""
        return []

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """The places of the reasoning: there is none."""
        return ()
