"""Tells whether the modules of a tick are compiled to C in this process, as in the wheel of `make compiled`."""

from __future__ import annotations

from pathlib import Path

from llamaq.worker.engine_loop import tick_loop


def has_compiled_ticks() -> bool:
    """Return whether the modules of a tick are compiled. mypyc compiles all of them or none."""
    return Path(tick_loop.__file__).suffix != ".py"
