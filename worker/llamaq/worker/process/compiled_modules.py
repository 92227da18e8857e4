"""Tells whether this process runs the modules of a tick as C code: the wheel of `make compiled` has it."""

from __future__ import annotations

from pathlib import Path

from llamaq.worker.engine_loop import tick_loop


def has_compiled_ticks() -> bool:
    """Return whether the modules of a tick are compiled. mypyc compiles all of them or none."""
    return Path(tick_loop.__file__).suffix != ".py"
