"""The exit codes of a worker process and of its supervisor."""

from __future__ import annotations

EXIT_OK = 0
EXIT_CRASHED = 1
EXIT_CANNOT_START = 2
"""A restart would fail as well: the model does not exist, for example."""
EXIT_FORCED = 130
"""A second signal came before the shutdown that the first signal had started was complete."""
