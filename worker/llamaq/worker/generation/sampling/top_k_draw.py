"""Draws a token with the most common samplers: top-k, top-p, min-p and the temperature, in this order.

The drawn token is that of the general chain (`sampler_chain`), unless rounding decides which token is drawn. The draw
takes less than half of the time. A numpy call takes about a microsecond for 40 candidates, so this module makes few of
them, and Python adds up and searches lists.

A compiled worker also has `native_row_draws.cpp`. It draws the same token from the logits of the whole vocabulary in
a third of the time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import exp

from llamaq.common.protocol.sampler_names import SamplerName
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.core.job_parts import RowDraw
from llamaq.worker.generation.sampling.candidates import Logits, TokenIds
from llamaq.worker.generation.sampling.largest_logits import top_k_superset
from llamaq.worker.generation.sampling.logit_adjustment import check_finite
from llamaq.worker.generation.sampling.row_draws import NATIVE_DRAWS

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
        self._temperature = temperature if "temperature" in names else 1.0

    @staticmethod
    def supports(names: Sequence[SamplerName], params: SamplingDefaults) -> bool:
        """Whether a chain has top-k and only samplers of `ORDER`, in this order."""
        is_fixed = "temperature" not in names or params.dynatemp_range == 0
        return "top_k" in names and is_fixed and list(names) == [name for name in ORDER if name in names]

    def row_draw(self, uniform: float, masked: tuple[int, ...] = ()) -> RowDraw:
        """Return the description of a draw.

        Args:
            uniform: A random number in [0, 1).
            masked: Tokens that are not drawn.
        """
        return RowDraw(self.k, self._top_p, self._min_p, self._min_keep, self._temperature, masked, uniform)

    def draw(self, logits: Logits, uniform: float) -> int | None:
        """Draw a token of the whole vocabulary. None: all logits are minus infinity.

        Args:
            logits: The logits of all tokens.
            uniform: A random number in [0, 1).

        Raises:
            JobRejected: A logit is NaN or plus infinity.
        """
        if NATIVE_DRAWS is not None:
            (token,) = NATIVE_DRAWS(logits, [self.row_draw(uniform)], 1)
            if token is not None:
                return token
        tokens, largest = top_k_superset(logits, self.k)
        check_finite(largest)
        return self.draw_of(logits.take(tokens), tokens, uniform) if tokens.size else None

    def draw_of(self, logits: Logits, tokens: TokenIds, uniform: float) -> int:
        """Draw one of these tokens by inverse transform sampling, in the order of ids, as `LogitSampler` does.

        Args:
            logits: At least the `k` largest logits, or all that are finite.
            tokens: Their tokens, in ascending order.
            uniform: A random number in [0, 1).
        """
        order = (-logits).argsort(kind="stable")[: self.k]
        ranked: list[float] = logits.take(order).tolist()
        largest = ranked[0]
        kept = order[: self._count_kept([exp(logit - largest) for logit in ranked])]
        kept.sort()
        scaled = [(logit - largest) / self._temperature for logit in logits.take(kept).tolist()]
        reached = list(accumulate(map(exp, scaled)))
        place = bisect_right(reached, uniform * reached[-1], 0, len(reached) - 1)  # rounding can make both equal
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
