"""The exit codes of a worker process and of its supervisor."""

from __future__ import annotations

EXIT_OK = 0
EXIT_CRASHED = 1
EXIT_CANNOT_START = 2
"""The worker cannot start, and a restart would fail too. Example: the model does not exist."""
EXIT_FORCED = 130
"""A second signal forced the exit before the shutdown of the first signal was complete."""
