"""Logging of llamaq's own processes. A library never does this; only entry points call it."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s[%(process)d] %(message)s"


def configure_logging(level: str) -> None:
    """Log to standard error, from this level on."""
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=FORMAT)
