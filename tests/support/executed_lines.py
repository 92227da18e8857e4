"""Counts the lines of Python that a call executes: a measure of its work that does not depend on the machine.

Compiled modules and C functions execute no such lines, so only upper bounds can be checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_executed_lines(call: Callable[[], object]) -> int:
    """Return how many lines `call` executes, those of the functions that it calls included."""
    n_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal n_lines
        n_lines += event == "line"
        return trace

    earlier = sys.gettrace()  # coverage has one
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(earlier)
    return n_lines
