"""Programs in Python's development mode, which reports on stderr what a program leaves open or forgets to await."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(code: str, *args: str) -> list[str]:
    """Return the command that runs some code in the development mode."""
    return [sys.executable, "-X", "dev", "-c", code, *args]


def environment() -> dict[str, str]:
    """Return the variables with which a child process imports llamaq from this checkout, and writes no colours."""
    paths = os.pathsep.join(str(ROOT / portion) for portion in ("common", "producer", "worker"))
    return {**os.environ, "PYTHONPATH": paths, "TERM": "dumb"}


def run_script(code: str, *args: str) -> subprocess.Popen[str]:
    """Start some code in the development mode, with pipes for its output and its errors."""
    return subprocess.Popen(
        command(code, *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def is_slow_step(line: str) -> bool:
    """Tell whether a line of stderr only reports that a step of the event loop took longer than 0.1 s.

    The development mode writes such lines on a busy machine.
    """
    return re.match(r"Executing <.* took .* seconds", line) is not None


def complaints(err: str) -> list[str]:
    """Return the lines of stderr without the reports of slow steps."""
    return [line for line in err.splitlines() if not is_slow_step(line)]
