"""The option `bad_words`: sequences of tokens that a job does not generate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class BadWords:
    """Tells which tokens would complete a bad word.

    As in vLLM, a word is banned as the tokens that the tokenizer makes of it, at the start of a text and after a space.
    The same letters in other tokens are not banned.

    Attributes:
        single_tokens: The words of one token, which are never drawn.
        last_tokens: The last tokens of the other words.

    Args:
        words: The tokens of each word.
    """

    def __init__(self, words: Iterable[Sequence[int]] = ()) -> None:
        found = {tuple(word) for word in words}
        self.single_tokens = frozenset(word[0] for word in found if len(word) == 1)
        self._words: dict[int, list[tuple[int, ...]]] = {}
        """Maps the last token but one to the words that have it there."""
        for word in found:
            if len(word) > 1 and not self.single_tokens.intersection(word):
                self._words.setdefault(word[-2], []).append(word)
        self.last_tokens = frozenset(word[-1] for words in self._words.values() for word in words)

    @classmethod
    def encode(cls, words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> BadWords:
        """Return bad words by their texts. `encode` returns the tokens of a text that is a part of a longer text."""
        if not words:  # nearly every job
            return NO_BAD_WORDS
        texts = [word.lstrip() or word for word in words]
        return cls(tokens for text in texts for form in (text, " " + text) if (tokens := encode(form)))

    def completed_after(self, history: Sequence[int], n_prompt: int) -> list[int]:
        """Return the last tokens, in ascending order, of the words of which the output has all other tokens at its end.

        Args:
            history: The prompt, then the generated tokens.
            n_prompt: The length of the prompt in tokens.
        """
        n_generated = len(history) - n_prompt
        if not n_generated or (words := self._words.get(history[-1])) is None:
            return []
        return sorted({word[-1] for word in words if len(word) <= n_generated + 1 and _ends_with(history, word[:-1])})

    def __repr__(self) -> str:
        return f"<BadWords {len(self.single_tokens)} single, {sum(map(len, self._words.values()))} longer>"


def _ends_with(history: Sequence[int], tokens: tuple[int, ...]) -> bool:
    return tuple(history[-len(tokens) :]) == tokens


NO_BAD_WORDS = BadWords()
