"""Computes the probabilities of a prompt's tokens from their logits, several rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.prompt_logprobs import row_bytes
from llamaq.worker.core.finish_rules import NOT_NUMBERS
from llamaq.worker.generation.sampling.largest_logits import top_k_superset
from llamaq.worker.generation.sampling.logprobs import LOWEST

Rows = npt.NDArray[np.float32]
MAX_BLOCK_BYTES = 1024 * 1024
"""Largest size of the rows that are computed at once, unless one row is larger. They should stay in the cache of the
CPU, because each row is read several times."""


class PromptScorer:
    """Computes the probabilities of the tokens of one prompt; implements `core.job_parts.PromptScorer`.

    The probabilities are those of the model, as in `token_logprobs`.

    Args:
        n_top: Number of alternatives at each position.
    """

    def __init__(self, n_top: int) -> None:
        self.n_top = n_top

    def score(self, rows: Rows, tokens: Sequence[int]) -> bytes:
        """Return the rows of `PromptLogprobs`; see `core.job_parts.PromptScorer`."""
        scores = np.empty((len(rows), row_bytes(self.n_top) // 4), "<i4")
        wanted = np.array(tokens, np.intp)
        n_in_block = max(1, MAX_BLOCK_BYTES // rows[0].nbytes)
        scratch = np.empty_like(rows[:n_in_block])  # new memory for each block would take as long as `exp`
        for start in range(0, len(rows), n_in_block):
            block = slice(start, start + n_in_block)
            self._score_block(rows[block], wanted[block], scores[block], scratch)
        return scores.tobytes()

    def _score_block(
        self, rows: Rows, tokens: npt.NDArray[np.intp], scores: npt.NDArray[np.int32], scratch: Rows
    ) -> None:
        """Write the scores of some tokens, in the form of `row_format`."""
        logits = rows[np.arange(len(rows)), tokens]
        log_totals = _log_totals(rows, scratch[: len(rows)])
        numbers = scores.view("<f4")
        numbers[:, 0] = _logarithms(logits, log_totals)
        scores[:, 1] = _ranks(rows, logits, scratch[0])
        if self.n_top:
            best = _best_tokens(rows, self.n_top)
            scores[:, 2 : 2 + self.n_top] = best
            found = np.take_along_axis(rows, best, axis=1)
            numbers[:, 2 + self.n_top :] = _logarithms(found, log_totals[:, None])


def _log_totals(rows: Rows, scratch: Rows) -> npt.NDArray[np.float64]:
    """Return ln(sum(exp(logits))) of each row. `scratch` has the shape of the rows.

    Raises:
        JobRejected: A logit is plus infinity or NaN.
    """
    largest = rows.max(axis=1)
    if not np.isfinite(largest).all():  # NaN if any logit is NaN
        raise JobRejected(ErrorCode.DECODE_FAILED, NOT_NUMBERS)
    weights = np.exp(np.subtract(rows, largest[:, None], out=scratch), out=scratch)
    # numpy adds in pairs: the error is far below that of the logits
    totals: npt.NDArray[np.float64] = largest + np.log(weights.sum(axis=1).astype(np.float64))
    return totals


def _ranks(rows: Rows, logits: Rows, scratch: npt.NDArray[np.float32]) -> list[int]:
    """Return 1 for the most probable token, 2 for the next one, ... for the token with this logit in each row.

    The comparisons of a row are written to `scratch`. `count_nonzero` of several rows would take five times as long.
    """
    is_larger = scratch.view(np.bool_)[: rows.shape[1]]
    return [
        1 + int(np.count_nonzero(np.greater(row, logit, out=is_larger)))
        for row, logit in zip(rows, logits, strict=True)
    ]


def _logarithms(logits: Rows, log_totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the logarithms of probabilities as finite numbers."""
    return np.maximum(logits - log_totals, LOWEST)


def _best_tokens(rows: Rows, n_top: int) -> npt.NDArray[np.intp]:
    """Return the most probable tokens of each row, the most probable one first."""
    if n_top == 1:
        best: npt.NDArray[np.intp] = rows.argmax(axis=1).reshape(-1, 1)
        return best
    return np.array([_best_of_row(row, n_top) for row in rows])


def _best_of_row(row: Rows, n_top: int) -> npt.NDArray[np.intp]:
    found, _ = top_k_superset(row, n_top)
    if len(found) < n_top:  # a small vocabulary, or masked tokens
        found = np.arange(row.size)
    best: npt.NDArray[np.intp] = found[np.argsort(-row[found], kind="stable")][:n_top]
    return best
