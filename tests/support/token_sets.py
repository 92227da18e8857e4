"""Sets of tokens for tests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llamaq.worker.generation.grammar.token_set import TokenSet


def set_of_mask(mask: npt.NDArray[np.bool_]) -> TokenSet:
    """Return the tokens for which a mask, shape (n_vocab,), is true."""
    return TokenSet(np.packbits(mask, bitorder="little").tobytes(), mask.size)
