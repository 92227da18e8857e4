"""Samplers whose distribution depends on how probable the drawn tokens were: Mirostat and adaptive-p.

Their state is a function of the probabilities of all draws of the job. These probabilities are stored with the tokens,
so a worker that resumes the job continues with the same state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import isnan, log, log2

import numpy as np
import numpy.typing as npt

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling.candidate_filters import top_k
from llamaq.worker.generation.sampling.candidates import Candidates

Probabilities = npt.NDArray[np.float64]

N_ESTIMATED = 100
"""Mirostat 1 estimates the distribution from this number of most probable tokens: `m` of llama.cpp."""
LEAST_PROBABILITY = 1e-300
LN_2 = log(2)
# The constants of llama_sampler_adaptive_p.
WIDTH, PEAK_LOGIT, SHARPNESS = 0.3, 5.0, 10.0


class DrawFeedback(ABC):
    """Changes the distribution of a draw by the probabilities of the earlier draws.

    Attributes:
        accepts_masked: Whether candidates with a logit of minus infinity keep the probability 0.

    Args:
        draws: The probability of each drawn token so far, as `shape` returned it.
    """

    accepts_masked: bool

    def __init__(self, draws: Sequence[float]) -> None:
        self._draws = list(draws)
        self._n_counted = 0
        """Number of draws in the state."""
        self._reset()

    def shape(self, candidates: Candidates, n_drawn: int, n_vocab: int) -> tuple[Candidates, Probabilities]:
        """Return the candidates of the next draw, and for each the probability that `record` gets if it is drawn.

        Args:
            candidates: The candidates after the filters.
            n_drawn: Number of tokens that were drawn before. Later draws are forgotten.
            n_vocab: Number of tokens of the vocabulary.
        """
        del self._draws[n_drawn:]
        if self._n_counted > n_drawn:
            self._n_counted = 0
            self._reset()
        for probability in self._draws[self._n_counted :]:
            self._count(probability)
        self._n_counted = len(self._draws)
        return self._shape(candidates, n_vocab)

    def record(self, probability: float) -> None:
        """Record the probability of the token that was drawn."""
        self._draws.append(probability)

    @abstractmethod
    def _reset(self) -> None:
        """Set the state at the start of a job."""

    @abstractmethod
    def _count(self, probability: float) -> None:
        """Advance the state by one draw."""

    @abstractmethod
    def _shape(self, candidates: Candidates, n_vocab: int) -> tuple[Candidates, Probabilities]:
        """Return what `shape` returns, for the current state."""


class Mirostat(DrawFeedback):
    """Mirostat 2: draws from the tokens whose surprise, in bits, is at most mu. Source: llama_sampler_mirostat_v2.

    Each draw moves mu, so that the surprise of the drawn tokens stays near tau (Basu et al., arXiv:2007.14966).

    Args:
        params: The sampling parameters.
        draws: As in `DrawFeedback`.
    """

    accepts_masked = True

    def __init__(self, params: SamplingDefaults, draws: Sequence[float]) -> None:
        self._tau, self._eta = params.mirostat_tau, params.mirostat_eta
        self.mu = 0.0
        super().__init__(draws)

    def _reset(self) -> None:
        self.mu = 2 * self._tau

    def _count(self, probability: float) -> None:
        self.mu -= self._eta * (-log2(max(probability, LEAST_PROBABILITY)) - self._tau)

    def _shape(self, candidates: Candidates, n_vocab: int) -> tuple[Candidates, Probabilities]:
        kept = self._keep(candidates, n_vocab)
        return kept, kept.probabilities()

    def _keep(self, candidates: Candidates, n_vocab: int) -> Candidates:  # noqa: ARG002 - Mirostat 1 needs it
        # The surprise of a candidate is log2(total weight) + (max_logit - logit) / ln(2).
        least = float(candidates.max_logit) + log(candidates.weights().sum(dtype=np.float64)) - self.mu * LN_2
        kept = candidates.take((candidates.logits >= np.float32(least)).nonzero()[0])
        return kept if len(kept) else top_k(candidates, 1)


class Mirostat1(Mirostat):
    """Mirostat 1: draws from the k most probable tokens. Source: llama_sampler_mirostat.

    k follows from mu and from the exponent of Zipf's law, which is estimated from the most probable tokens.

    Args:
        params: The sampling parameters.
        draws: As in `DrawFeedback`.
    """

    def _keep(self, candidates: Candidates, n_vocab: int) -> Candidates:
        logits = top_k(candidates, N_ESTIMATED).logits[:N_ESTIMATED].astype(np.float64)
        if len(logits) < 2:
            return candidates
        ranks = np.arange(1, len(logits))
        steps = np.log((ranks + 1) / ranks)
        exponent = float(steps @ -np.diff(logits) / (steps @ steps))
        n_kept = int(min(self.n_kept(exponent, n_vocab), len(candidates)))
        return top_k(candidates, n_kept).by_token()

    def n_kept(self, exponent: float, n_vocab: int) -> float:
        """Return k = ((e - 1) * 2 ** mu / (1 - n_vocab ** (1 - e))) ** (1 / e), at least 1, for the exponent e."""
        epsilon = np.float64(exponent - 1)
        with np.errstate(all="ignore"):
            k = float((epsilon * np.exp2(self.mu) / (1 - n_vocab**-epsilon)) ** (1 / np.float64(exponent)))
        return 1.0 if isnan(k) else max(1.0, k)


class AdaptiveP(DrawFeedback):
    """Adaptive-p: prefers tokens near a probability. This probability moves so that the average of the draws reaches
    the target.

    Source: llama_sampler_adaptive_p.

    Args:
        params: The sampling parameters.
        draws: As in `DrawFeedback`.
    """

    accepts_masked = False

    def __init__(self, params: SamplingDefaults, draws: Sequence[float]) -> None:
        self._target, self._decay = params.adaptive_target, params.adaptive_decay
        self._sum = self._weight = 0.0
        super().__init__(draws)

    def _reset(self) -> None:
        self._sum, self._weight = self._target / (1 - self._decay), 1 / (1 - self._decay)

    def _count(self, probability: float) -> None:
        self._sum = probability + self._decay * self._sum
        self._weight = 1 + self._decay * self._weight

    def _shape(self, candidates: Candidates, n_vocab: int) -> tuple[Candidates, Probabilities]:  # noqa: ARG002
        probabilities = candidates.probabilities()
        target = min(1.0, max(0.0, 2 * self._target - self._sum / self._weight))
        distance = np.abs(probabilities - target) / WIDTH
        logits = PEAK_LOGIT - SHARPNESS * distance**2 / (1 + distance)
        return candidates.with_logits(logits.astype(np.float32)), probabilities


def draw_feedback(params: SamplingDefaults, draws: Sequence[float]) -> DrawFeedback | None:
    """Return what the sampling parameters ask for, or None."""
    if params.mirostat == 1:
        return Mirostat1(params, draws)
    if params.mirostat == 2:
        return Mirostat(params, draws)
    if params.adaptive_target >= 0 and "adaptive_p" in params.samplers:
        return AdaptiveP(params, draws)
    return None
