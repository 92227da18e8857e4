"""The probabilities of a prompt's tokens, computed by llama-cpp-python alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tests.support.lazy_import import lazy_import

if TYPE_CHECKING:
    import llama_cpp
else:
    llama_cpp = lazy_import("llama_cpp")


class PromptOracle:
    """llama-cpp-python with `logits_all`."""

    def __init__(self, model: Path) -> None:
        self._llama = llama_cpp.Llama(
            str(model), n_ctx=1024, logits_all=True, flash_attn=True, verbose=False, n_threads=1
        )

    def logprobs(self, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the logarithms of all probabilities at each position, shape (n_tokens, n_vocab)."""
        self._llama.reset()
        self._llama.eval(list(tokens))
        logits = np.array(self._llama.scores[: len(tokens)], np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits
