"""Cuts texts that llama.cpp cannot tokenize in one piece.

Some pre-tokenizers are run by `std::regex`, which recurses once or more for each character of a match: some 30,000
characters without a space overflow the stack and end the process. And the time for special tokens grows with the
square of their number. Both are harmless in parts.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from llamaq.common.vocab.special_tokens import Span

LONG_RUN = 1024
"""Characters without a change between space and non-space that are cut; ordinary text has no such run."""
SPECIALS_PER_PART = 512

_RUN = re.compile(r"\S+|\s+")


def cut_text(text: str, specials: Sequence[Span], *, cuts_runs: bool) -> list[str]:
    """`text` in parts that are to be tokenized one by one.

    Cuts before special texts (`specials` says where they stand) change no token. Within long runs, cut where letters or
    digits end, they seldom do; elsewhere they change the tokens around the cut.
    """
    cuts = {span.start for span in specials[SPECIALS_PER_PART::SPECIALS_PER_PART]}
    if cuts_runs and len(text) > LONG_RUN:
        for run in _RUN.finditer(text):
            if run.end() - run.start() > LONG_RUN:
                cuts.update(_outside(cut, specials) for cut in _cut_run(text, run.start(), run.end()))
    if not cuts:
        return [text]
    return [text[start:end] for start, end in pairwise(sorted({0, len(text), *cuts}))]


def _cut_run(text: str, start: int, end: int) -> Iterator[int]:
    while end - start > LONG_RUN:
        window = range(start + LONG_RUN, start + LONG_RUN // 2, -1)
        start = next((at for at in window if _ends_word(text, at)), start + LONG_RUN)
        yield start


def _ends_word(text: str, at: int) -> bool:
    return text[at - 1].isalnum() and not text[at].isalnum() and text[at] not in "'\u2019"


def _outside(cut: int, specials: Sequence[Span]) -> int:
    """The cut, moved before the special text that it would go through."""
    index = bisect_left(specials, (cut, 0)) - 1  # the last one that starts before it
    return specials[index].start if index >= 0 and cut < specials[index].end else cut
