"""Random lists of tokens that share long prefixes, and the length of their common prefix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

# Only a few different tokens, so that random lists share long prefixes. The encodings of some tokens have the same
# bytes at different positions. So a comparison that begins inside a token finds matches that do not exist.
TOKEN = st.sampled_from([0, 1, 256, 257, 65537, -1, 2**31 - 1, -(2**31)])
TOKENS = st.lists(TOKEN, max_size=7)


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix, compared token by token."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
