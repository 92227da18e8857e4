"""Ends the reasoning of a job after a number of tokens, by forcing the tokens of its closing tag."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_CHARACTER_BYTES = 4
"""Longest character of UTF-8."""


class ReasoningBudget:
    """Tells which token a job must generate next because its reasoning has reached the limit.

    The tags are found in the bytes of the tokens, because a model may write a tag with other tokens than the tokenizer.
    Where a tag is one token of the vocabulary, `piece` returns bytes that no other tokens have. The state is a function
    of the generated tokens, so a worker that resumes the job continues with the same state.

    Args:
        limit: Largest number of tokens of reasoning in the whole output.
        opening: The bytes of the tag before reasoning, in the form of `piece`.
        closing: The bytes of the tag after reasoning, in the form of `piece`.
        closing_tokens: The tokens of the closing tag.
        piece: Returns the bytes of a token.
        prompt: The bytes of the prompt, in the form of `piece`, which may have begun the reasoning.
    """

    def __init__(
        self,
        limit: int,
        opening: bytes,
        closing: bytes,
        closing_tokens: Sequence[int],
        piece: Callable[[int], bytes],
        prompt: bytes,
    ) -> None:
        self._limit = limit
        self._opening, self._closing = opening, closing
        self._closing_tokens = closing_tokens
        self._piece = piece
        self._n_kept = max(len(opening), len(closing), MAX_CHARACTER_BYTES)
        _, opened, rest = prompt.rpartition(opening)
        self._is_open = bool(opened) and closing not in rest
        self._text = b""
        """The end of the output, from the last tag on."""
        self._n_read = 0
        """Number of generated tokens in the state."""
        self._n_reasoning = 0
        self._n_closed = 0
        """Number of tokens of the closing tag at the end of the output that were forced."""

    def forced_token(self, history: Sequence[int], n_prompt: int) -> int | None:
        """Return the token that must follow `history`. None: the job may generate any token.

        Args:
            history: The prompt, then the generated tokens. Each history begins with that of the last call.
            n_prompt: The length of the prompt in tokens.
        """
        for token in history[n_prompt + self._n_read :]:
            self._read(token)
        if not self._must_close:
            return None
        return self._closing_tokens[self._n_closed]

    @property
    def _must_close(self) -> bool:
        is_spent = self._is_open and self._n_reasoning >= self._limit
        return is_spent and (self._n_closed > 0 or _ends_with_whole_character(self._text))

    def _read(self, token: int) -> None:
        is_forced = self._must_close and token == self._closing_tokens[self._n_closed]
        self._n_closed = (self._n_closed + 1) % len(self._closing_tokens) if is_forced else 0
        self._n_read += 1
        self._text += self._piece(token)
        _, tag, rest = self._text.rpartition(self._closing if self._is_open else self._opening)
        if tag:
            self._is_open = not self._is_open
            self._n_closed = 0
            self._text = rest
        else:
            self._n_reasoning += self._is_open and not is_forced
        self._text = self._text[-self._n_kept :]

    def __repr__(self) -> str:
        return f"<ReasoningBudget {self._n_reasoning} of {self._limit}{' open' if self._is_open else ''}>"


def _ends_with_whole_character(text: bytes) -> bool:
    """Return whether a text does not end within a character of UTF-8."""
    for n_bytes, byte in enumerate(reversed(text[-MAX_CHARACTER_BYTES:]), 1):
        if byte < 0x80:
            return True
        if byte >= 0xC0:  # the first byte of a character tells its length
            return n_bytes >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True
