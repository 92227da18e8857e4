"""The curriculum and the learning rate as functions of the training progress, which runs from 0 to 1."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from llamaq.tools.demo_model.corpus import Mixture

WARMUP: Final = 0.01
"""Share of the training during which the learning rate rises to its peak."""

ANNEAL: Final = 0.5
"""Share of the training, at its end, during which the learning rate falls to zero."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the curriculum. Later stages have longer contexts and more facts than earlier stages."""

    until: float
    """Progress at which the stage ends."""
    lengths: tuple[int, ...]
    """Row lengths in tokens. Each step draws one of them."""
    batch_tokens: int
    mixture: Mixture


CURRICULUM: Final = (
    Stage(0.10, (64,), 4096, Mixture(recall=9, stories=0, dialogues=1)),
    Stage(0.22, (128,), 4096, Mixture(recall=7, stories=0, dialogues=3)),
    Stage(0.60, (256,), 4096, Mixture(recall=4, stories=2, dialogues=4)),
    Stage(0.75, (256, 512), 4096, Mixture(recall=4, stories=2, dialogues=4)),
    Stage(0.90, (256, 512, 1024), 4096, Mixture(recall=5, stories=1, dialogues=4)),
    Stage(1.00, (256, 512, 1024, 2048), 4096, Mixture(recall=5, stories=1, dialogues=4)),
)


def stage_at(progress: float) -> Stage:
    """Return the stage of the curriculum at `progress`."""
    return next((stage for stage in CURRICULUM if progress < stage.until), CURRICULUM[-1])


def draw_length(stage: Stage, seed: str) -> int:
    """Draw the row length of a step."""
    return random.Random(seed).choice(stage.lengths)


def rate_at(progress: float) -> float:
    """Return the learning rate as a share of its peak: it rises, stays at the peak, and falls linearly to zero."""
    return max(0.0, min(1.0, progress / WARMUP, (1.0 - progress) / ANNEAL))
