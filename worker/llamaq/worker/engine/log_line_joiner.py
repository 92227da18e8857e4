"""Joins the pieces that llama.cpp logs into lines for Python's logging."""

from __future__ import annotations

import logging
from collections.abc import Iterator

# Maps each ggml_log_level to a level of Python's logging. Info messages of llama.cpp are logged as debug, and its
# warnings as info, because both are written for developers, not for operators.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
# The context is larger than the model's training context. This is intended, because jobs share the context. The worker
# bounds the context of each job. So this warning is logged as debug.
_INTENDED = "possible training context overflow"
# The system refuses `use_mlock`: an operator who asked for it must learn that the model may be swapped out.
_NOT_LOCKED = ("failed to mlock", "RLIMIT_MEMLOCK")
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
                yield self._level_of(line), line.rstrip()

    def _level_of(self, line: str) -> int:
        if _INTENDED in line:
            return logging.DEBUG
        return logging.WARNING if any(text in line for text in _NOT_LOCKED) else self._level
