"""Counts how much of a job's output a reader has, to detect gaps and repeats in the events."""

from __future__ import annotations

from llamaq.common.protocol.job_events import Tokens, TokenSpan

Span = Tokens | TokenSpan
"""A part of a job's output."""


class OutputPosition:
    """Counts the tokens and characters of a job's output that were read, to detect gaps and repeats in its events."""

    __slots__ = ("chars", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.chars = 0

    def is_before(self, span: Span) -> bool:
        """Return whether output is missing between this position and the span."""
        return span.offset > self.tokens or span.text_offset > self.chars

    def is_at_end_of(self, span: Span) -> bool:
        """Return whether the span has no new output."""
        return span.offset + len(span.tokens) <= self.tokens and span.text_offset + len(span.text) <= self.chars

    def advance(self, span: Span) -> TokenSpan | None:
        """Move to the end of the span and return its new output, or None if all of it was read before.

        The caller ensures that the position is not before the span.
        """
        tokens, text, logprobs, tag_offsets = span.tokens, span.text, span.logprobs, span.tag_offsets
        if type(span) is TokenSpan and span.offset == self.tokens and span.text_offset == self.chars:
            self.tokens += len(tokens)
            self.chars += len(text)
            return span if tokens or text else None
        if self.is_at_end_of(span):
            return None
        if span.offset != self.tokens:
            tokens, logprobs = tokens[self.tokens - span.offset :], logprobs[self.tokens - span.offset :]
        prompt_logprobs = None if self.tokens else span.prompt_logprobs
        if span.text_offset != self.chars:
            text = text[self.chars - span.text_offset :]
            tag_offsets = tuple(each for each in tag_offsets if each >= self.chars)
        new = TokenSpan(
            self.tokens,
            tokens,
            self.chars,
            text,
            logprobs,
            tag_offsets=tag_offsets,
            prompt_logprobs=prompt_logprobs,
        )
        self.tokens += len(tokens)
        self.chars += len(text)
        return new
