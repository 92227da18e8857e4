"""Objects of the user's own, named `module:attribute` in a setting."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from llamaq.common.errors import InvalidSettings
from llamaq.common.settings import ENV_PREFIX


def load_object(spec: str, setting: str) -> Any:
    """What `module:attribute` names, looked for in the working directory too; raises `InvalidSettings`."""
    flag = f"--{setting.replace('_', '-')} ({ENV_PREFIX}{setting.upper()})"
    module, colon, attribute = spec.partition(":")
    if not (module and colon and attribute):
        raise InvalidSettings(f"{flag}: {spec!r} is not of the form module:attribute")
    _look_here_too()
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as exc:  # a user's module may raise anything
        raise InvalidSettings(f"{flag}: {spec!r} cannot be loaded: {type(exc).__name__}: {exc}") from exc


def _look_here_too() -> None:
    """Let modules be found in the working directory, as uvicorn does: a console script does not look there."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def load_hooks(specs: tuple[str, ...]) -> list[Any]:
    """The functions that `--hooks` names."""
    hooks = [load_object(spec, "hooks") for spec in specs]
    for spec, hook in zip(specs, hooks, strict=True):
        if not callable(hook):
            raise InvalidSettings(f"--hooks ({ENV_PREFIX}HOOKS): {spec!r} is not callable")
    return hooks
