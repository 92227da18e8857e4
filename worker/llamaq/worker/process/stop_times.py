"""How long the last steps of a worker that stops may take. The supervisor waits for them."""

from __future__ import annotations

LEAVE_TIMEOUT_S = 5.0
"""How long a worker takes at most to leave its queue."""
SAVE_TIMEOUT_S = 10.0
"""Upper bound on the seconds that a stopping worker spends on writing its prefix cache to disk."""
