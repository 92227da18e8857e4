"""Joins the pieces that llama.cpp logs into lines for Python's logging."""

from __future__ import annotations

import logging
from collections.abc import Iterator

# Level of logging for each ggml_log_level. Info of llama.cpp becomes debug, and warnings become info: llama.cpp writes
# both for developers, not for operators. For example it warns that the context is larger than the model's training
# context, which llamaq intends, because jobs share the context.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_CONT = 5  # GGML_LOG_LEVEL_CONT: the piece continues the previous one


class LogLineJoiner:
    """Joins pieces of log text into lines. A line has the level of its first piece."""

    def __init__(self) -> None:
        self._level = logging.DEBUG
        self._text = ""

    def add(self, level: int, text: str) -> Iterator[tuple[int, str]]:
        """Add a piece, and yield the level and the text of each line that it completes."""
        if level != _CONT:
            self._level = _LEVELS.get(level, logging.DEBUG)
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            if line.strip(" ."):
                yield self._level, line.rstrip()
