"""Splits an answer of any format into its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamaq.common.protocol.job_outcome import FinishReason, Result
from llamaq.producer.answer_parts.harmony_splitter import HarmonySplitter
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Part
from llamaq.producer.answer_parts.tagged_splitter import TaggedSplitter


class AnswerSplitter:
    """Splits one answer into its parts. A call without arguments gets `{}`.

    Args:
        splitter: The splitter of the format.
        is_parallel: Whether the answer may have several calls. Otherwise those after the first one are left out.
    """

    def __init__(self, splitter: HarmonySplitter | TaggedSplitter, *, is_parallel: bool) -> None:
        self._splitter = splitter
        self._is_parallel = is_parallel
        self._missing: list[Part] = []
        """The arguments of the last call, if it has none so far."""

    def feed(self, text: str, tag_offsets: Sequence[int] = ()) -> list[Part]:
        """Return the parts that a further piece of the answer completes.

        Args:
            text: The piece.
            tag_offsets: Positions in the whole answer, in characters, of the tokens that are tags and begin there.
        """
        return self._complete(self._splitter.feed(text, tag_offsets))

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the last parts, at the end of the answer. If it `is_cut` off, its last call may lack arguments."""
        parts = self._complete(self._splitter.finish())
        return parts if is_cut else parts + self._missing

    def read(self, result: Result) -> list[Part]:
        """Return the parts of the whole answer of a job."""
        parts = self.feed(result.text, result.tag_offsets)
        return parts + self.finish(is_cut=result.finish_reason is not FinishReason.STOP)

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """The places of the reasoning so far: the positions of its first characters, and those after its last ones."""
        return tuple(self._splitter.reasoning_spans)

    def _complete(self, parts: Iterable[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if isinstance(part, CallStarted | CallArguments) and part.index and not self._is_parallel:
                continue
            if not isinstance(part, CallArguments):
                found += self._missing
                self._missing = [CallArguments(part.index, "{}")] if isinstance(part, CallStarted) else []
            elif part.text.strip():
                self._missing = []
            found.append(part)
        return found
