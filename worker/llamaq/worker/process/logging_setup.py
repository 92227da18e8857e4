"""Logging of llamaq's processes. Only entry points call this: importing a library must not configure logging."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s[%(process)d] %(message)s"


def configure_logging(level: str) -> None:
    """Log messages of at least `level` to standard error."""
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=FORMAT)
