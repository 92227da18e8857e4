"""Draws a token with the most common samplers: top-k, top-p, min-p and the temperature, in this order.

The drawn token is that of the general chain (`sampler_chain`), because every number is the same to the last bit. The
draw takes less than half of the time. A numpy call takes about a microsecond for 40 candidates, so this module makes
few such calls, and Python adds up and searches lists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from llamaq.common.protocol.sampler_names import SamplerName
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling.candidates import Logits, TokenIds

ORDER: tuple[SamplerName, ...] = ("top_k", "top_p", "min_p", "temperature")


class TopKDraw:
    """A chain of samplers that begins with top-k, and the draw after it.

    Args:
        names: The samplers of the chain.
        params: Their parameters.
        temperature: The temperature, above 0.
    """

    def __init__(self, names: Sequence[SamplerName], params: SamplingDefaults, temperature: float) -> None:
        self.k = params.top_k
        self._top_p = params.top_p if "top_p" in names else 1.0
        self._min_p = params.min_p if "min_p" in names else 0.0
        self._min_keep = params.min_keep
        self._temperature = np.float32(temperature if "temperature" in names else 1)

    @staticmethod
    def supports(names: Sequence[SamplerName], params: SamplingDefaults) -> bool:
        """Whether a chain has top-k and only samplers of `ORDER`, in this order."""
        is_fixed = "temperature" not in names or params.dynatemp_range == 0
        return "top_k" in names and is_fixed and list(names) == [name for name in ORDER if name in names]

    def draw(self, logits: Logits, tokens: TokenIds, uniform: float) -> int:
        """Draw a token by inverse transform sampling, in the order of ids, as `LogitSampler` does.

        Args:
            logits: At least the `k` largest logits, or all that are finite.
            tokens: Their tokens, in ascending order.
            uniform: A random number in [0, 1).
        """
        order = (-logits).argsort(kind="stable")[: self.k]
        ranked = logits.take(order)
        kept = order[: self._count_kept(np.exp(ranked - ranked[0]).tolist())]
        kept.sort()
        scaled = logits.take(kept) / self._temperature
        cumulative = list(accumulate(np.exp(scaled - ranked[0] / self._temperature).tolist()))
        # Rounding can make the product equal to the total.
        place = min(bisect_right(cumulative, uniform * cumulative[-1]), len(cumulative) - 1)
        return tokens.item(kept.item(place))

    def _count_kept(self, weights: list[float]) -> int:
        """Return how many of the most probable candidates are left after top-p and min-p, as `top_p_min_p` does."""
        n_kept = len(weights)
        if self._min_p > 0:
            n_kept -= bisect_left(weights[::-1], self._min_p)
        if self._top_p < 1:
            reached = list(accumulate(weights))
            n_kept = min(n_kept, bisect_left(reached, self._top_p * reached[-1]) + 1)
        return max(n_kept, self._min_keep)
