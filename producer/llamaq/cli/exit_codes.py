"""The exit codes of the `llamaq` command. docs/cli.md lists them."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
"""The job failed, or the command failed for a reason that no other code names."""
EXIT_USAGE = 2
"""An argument, an option, a setting or a parameter of a job is not valid."""
EXIT_NO_REDIS = 3
"""Redis or the HTTP server does not answer, or Redis refuses the command, or too few replicas confirmed a submit."""
EXIT_NO_ANSWER = 4
"""No worker serves the queue, the queue is full or draining, or the timeout was reached. A later call may succeed."""
EXIT_INTERRUPTED = 130
"""Ctrl-C ended the command."""
