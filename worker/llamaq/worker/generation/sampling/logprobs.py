"""The probabilities of a drawn token and of its alternatives, as the model computed them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llamaq.common.protocol.token_logprobs import TokenLogprobs


def token_logprobs(logits: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """Return ln(p_i), where p = softmax(logits), for a token and for the most probable tokens.

    The logits are those of the model: bias, penalties, grammar, temperature and filters do not change them.

    Args:
        logits: One value for each token of the vocabulary, shape (n_vocab,).
        token: The drawn token.
        n_top: Number of most probable tokens. The drawn token need not be one of them.
    """
    largest = np.float32(logits.max())
    log_total = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    best = np.argpartition(-logits, n_top - 1)[:n_top] if n_top else np.zeros(0, np.intp)
    best = best[np.argsort(-logits[best], kind="stable")]
    top = tuple((int(index), _rounded(float(logits[index]) - log_total)) for index in best)
    return TokenLogprobs(_rounded(float(logits[token]) - log_total), top)


def _rounded(value: float) -> float:
    """Return a finite number with the precision of the logits: a stored result has one for each alternative."""
    return round(max(value, -9999.0), 5)
