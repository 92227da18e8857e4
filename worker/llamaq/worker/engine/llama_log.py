"""From what llama.cpp logs to lines of Python's logging."""

from __future__ import annotations

import logging
from collections.abc import Iterator

# By ggml_log_level. Its warnings speak to who writes a program or converts a model (a context larger than the model was
# trained for, say, which we share among jobs), and not to who starts a worker.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_CONTINUES = 5


class LogLines:
    """Joins what llama.cpp logs in pieces into lines, each with the level of its first piece."""

    def __init__(self) -> None:
        self._level = logging.DEBUG
        self._text = ""

    def add(self, level: int, text: str) -> Iterator[tuple[int, str]]:
        """Add a piece; gives the lines that are complete now."""
        if level != _CONTINUES:
            self._level = _LEVELS.get(level, logging.DEBUG)
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            if line.strip(" ."):
                yield self._level, line.rstrip()
