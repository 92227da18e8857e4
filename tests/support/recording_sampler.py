"""A sampler that records what it draws from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamaq.worker.testing import GreedySampler


class RecordingSampler(GreedySampler):
    """Records the history and the logits of each draw."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple[tuple[int, ...], npt.NDArray[np.float32]]] = []

    def sample(
        self, logits: npt.NDArray[np.float32], history: Sequence[int], n_prompt: int, drawn: int | None = None
    ) -> int:
        self.draws.append((tuple(history), logits.copy()))
        return super().sample(logits, history, n_prompt, drawn)
