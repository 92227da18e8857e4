"""Splits texts that llama.cpp cannot tokenize in one call.

llama.cpp runs some pre-tokenizers with `std::regex`, which recurses at least once for each character of a match. A
match of about 30,000 characters overflows the stack and crashes the process. Most matches have no white space in them,
but some pre-tokenizers also match line feeds, control characters or single spaces. In addition, the time that llama.cpp
needs to find special tokens grows with the square of their number. Neither is a problem if the parts are short.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from llamaq.common.vocab.special_token_masking import Span

MAX_RUN_CHARS = 1024
"""Longer runs of white space, or of characters without white space, are split. Ordinary text has no such run."""
MAX_PART_CHARS = 8192
"""Upper bound on the characters of a part, not counting a special token at its end."""
MAX_SPECIALS_PER_PART = 512
"""Upper bound on the special tokens in one part."""

_RUN = re.compile(r"\S+|\s+")


def split_text(text: str, specials: Sequence[Span], *, splits_runs: bool) -> list[str]:
    """Split `text` into parts that are tokenized one by one.

    A split before a special token, or before the space between two words, changes no token. A long run is split at the
    end of a word if possible, which seldom changes a token. Any other split changes the tokens next to the split.

    Args:
        text: The text.
        specials: The special tokens in `text`, from left to right.
        splits_runs: Whether long runs and parts are split too; only pre-tokenizers that use regular expressions need
            this.

    Returns:
        The parts. Joined, they are `text`.
    """
    splits = {span.start for span in specials[MAX_SPECIALS_PER_PART::MAX_SPECIALS_PER_PART]}
    if splits_runs and len(text) > MAX_RUN_CHARS:
        for run in _RUN.finditer(text):
            if run.end() - run.start() > MAX_RUN_CHARS:
                splits.update(_split(text, run.start(), run.end(), MAX_RUN_CHARS, specials))
        for start, end in pairwise(sorted({0, len(text), *splits})):
            splits.update(_split(text, start, end, MAX_PART_CHARS, specials))
    if not splits:
        return [text]
    return [text[start:end] for start, end in pairwise(sorted({0, len(text), *splits}))]


def _split(text: str, start: int, end: int, n_most: int, specials: Sequence[Span]) -> Iterator[int]:
    """Yield indices between two indices, about `n_most` apart: before a space or at the end of a word if possible."""
    while end - start > n_most:
        candidates = range(start + n_most, start + n_most // 2, -1)
        for is_good in (_is_before_space, _ends_word):
            if (found := next((one for one in candidates if is_good(text, one)), None)) is not None:
                break
        start = start + n_most if found is None else found
        yield _before_special(start, specials)


def _is_before_space(text: str, position: int) -> bool:
    return text[position] == " " and not text[position - 1].isspace()


def _ends_word(text: str, position: int) -> bool:
    return text[position - 1].isalnum() and not text[position].isalnum() and text[position] not in "'\u2019"


def _before_special(position: int, specials: Sequence[Span]) -> int:
    """Return `position`, or the start of the special token if `position` is inside one."""
    index = bisect_left(specials, (position, 0)) - 1  # the last special token that starts before the index
    return specials[index].start if index >= 0 and position < specials[index].end else position
