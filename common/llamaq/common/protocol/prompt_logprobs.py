"""The probabilities of a prompt's tokens, as a worker computes them and as clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, NamedTuple, Self, overload

from llamaq.common.protocol.sampling import MAX_TOKEN_ID

MAX_VALUES = 500_000
"""Largest number of probabilities of one prompt: its tokens, each with its alternatives. They have 4 MB in Redis."""


class ScoredToken(NamedTuple):
    """The probability of a token after the tokens before it, and of its alternatives, as natural logarithms."""

    token: int
    logprob: float
    """Logarithm of the probability of the token."""
    top: tuple[tuple[int, float], ...]
    """Id and logarithm of the most probable tokens at this position, the most probable one first."""
    rank: int | None = None
    """Number of tokens that are at least as probable: 1 for the most probable token. None: it was not counted."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs(Sequence[ScoredToken | None]):
    """The tokens of a prompt with their probabilities. Nothing comes before the first token, so its entry is None.

    The entries are made from the packed numbers when they are read.

    Attributes:
        tokens: The tokens of the prompt.
        n_top: Number of alternatives at each position.
        rows: For each token but the first, `row_bytes(n_top)` bytes, little-endian: the logarithm of its probability
            (32-bit float) and its rank (32-bit integer), then the ids and the logarithms of the alternatives.
        end: The end token that the model drew after the prompt, if the job asked for `logprobs` too. None: the model
            drew another token, which is in the output.
    """

    tokens: tuple[int, ...]
    n_top: int
    rows: bytes = field(repr=False)
    end: ScoredToken | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> ScoredToken | None: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ScoredToken | None, ...]: ...
    def __getitem__(self, index: int | slice) -> ScoredToken | tuple[ScoredToken | None, ...] | None:
        if isinstance(index, slice):
            return tuple(map(self._entry, range(len(self.tokens))[index]))
        return self._entry(range(len(self.tokens))[index])

    def _entry(self, index: int) -> ScoredToken | None:
        if index == 0:
            return None
        row = row_format(self.n_top)
        logprob, rank, *top = row.unpack_from(self.rows, (index - 1) * row.size)
        alternatives = zip(top[: self.n_top], top[self.n_top :], strict=True)
        return ScoredToken(
            self.tokens[index], _rounded(logprob), tuple((each, _rounded(value)) for each, value in alternatives), rank
        )

    def as_json(self) -> list[dict[str, Any] | None]:
        """Return the entries as values of JSON."""
        return [None if each is None else each._asdict() for each in self]

    def packed(self) -> tuple[tuple[int, ...], int, bytes, ScoredToken | None]:
        """Return the values from which `unpack` makes this object."""
        return self.tokens, self.n_top, self.rows, self.end

    @classmethod
    def unpack(cls, values: Any) -> Self:
        """Return the object of the values that `packed` has returned.

        Raises:
            ValueError: They are not such values.
        """
        try:
            tokens, n_top, rows, end = values
            found = cls(tuple(map(int, tokens)), int(n_top), bytes(memoryview(rows)), _scored_token(end))
        except (TypeError, OverflowError) as exc:
            raise ValueError("prompt_logprobs has values of other types") from exc
        numbers = (0, *found.tokens)
        if not 0 <= found.n_top <= MAX_VALUES or min(numbers) < 0 or max(numbers) > MAX_TOKEN_ID:
            raise ValueError("prompt_logprobs: a number is out of range")
        if len(found.rows) != row_bytes(found.n_top) * max(0, len(found) - 1):
            raise ValueError("prompt_logprobs: the number of bytes is not that of the tokens")
        return found


def row_format(n_top: int) -> Struct:
    """Return the form of a row of `PromptLogprobs.rows`."""
    return Struct(f"<fi{n_top}i{n_top}f")


def row_bytes(n_top: int) -> int:
    """Return the size of a row of `PromptLogprobs.rows`."""
    return 8 * (1 + n_top)


def _scored_token(values: Any) -> ScoredToken | None:
    if values is None:
        return None
    token, logprob, top, rank = values
    alternatives = tuple((int(each), float(value)) for each, value in top)
    return ScoredToken(int(token), float(logprob), alternatives, None if rank is None else int(rank))


def _rounded(logprob: float) -> float:
    """Return a number with five decimals, about the precision of the logits."""
    return round(logprob, 5)
