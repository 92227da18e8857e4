"""The exit codes of a worker and of its supervisor."""

from __future__ import annotations

EXIT_OK = 0
EXIT_CRASHED = 1
EXIT_CANNOT_START = 2
"""Trying again would not help: no such model, say."""
EXIT_FORCED = 130
"""A second signal came before the first had done its work."""
