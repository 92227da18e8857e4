"""Stops a process that this process has started."""

from __future__ import annotations

import subprocess
from typing import Any


def stop_process(process: subprocess.Popen[Any], timeout_s: float) -> None:
    """Send SIGTERM, wait for the end of the process, and kill it if it has not ended after `timeout_s` seconds."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
