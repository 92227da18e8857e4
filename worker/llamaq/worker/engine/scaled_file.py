"""A file whose effect on a model has a strength."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ScaledFile:
    """A LoRA adapter or a control vector, and its strength."""

    path: Path
    """The GGUF file."""
    scale: float = 1
    """Factor of what the file adds. 0: nothing changes."""
