"""Cuts the text of an answer at its tokens, so that each piece has the probabilities of its token."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.gateway.completions.logprobs import token_object

Cut = tuple[str, list[dict[str, Any]]]
"""A text, and the probabilities of its tokens in the form of the OpenAI API."""


class TokenCuts:
    """Splits one answer. Its text may arrive later than its tokens, because an incomplete character has no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: deque[tuple[str, dict[str, Any]]] = deque()
        """The text and the probabilities of the tokens whose text has not arrived."""
        self._text = ""

    def feed(
        self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], pieces: Mapping[int, bytes]
    ) -> Iterator[Cut]:
        """Take new text and tokens, and yield the text of each token that is complete."""
        for token, each in zip(tokens, logprobs, strict=True):
            self._tokens.append((self._decoder.decode(pieces[token]), token_object(token, each, pieces)))
        self._text += text
        while self._tokens:
            expected, entry = self._tokens[0]
            if len(self._text) < len(expected) and expected.startswith(self._text):
                return
            self._tokens.popleft()
            # The text of a control token may be hidden.
            own = expected if self._text.startswith(expected) else ""
            self._text = self._text[len(own) :]
            yield own, [entry]

    def finish(self) -> Iterator[Cut]:
        """Yield the rest of the text: a stop string may have cut the last token."""
        if self._text:
            yield self._text, [entry for _, entry in list(self._tokens)[:1]]
        self._text = ""
