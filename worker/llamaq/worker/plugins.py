"""Objects of the user's own, named `module:attribute` in a setting."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from llamaq.common.errors import InvalidSettings
from llamaq.common.settings import ENV_PREFIX
from llamaq.worker.scheduling.batch_strategy import Balanced, BatchStrategy, DecodeMaximal, PrefillPriority


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


BUILT_IN: dict[str, type[BatchStrategy]] = {
    "decode-maximal": DecodeMaximal,
    "prefill-priority": PrefillPriority,
    "balanced": Balanced,
}


def load_strategy(name: str) -> BatchStrategy:
    """The strategy of that name: a built-in one, or `module:Class`, made without arguments.

    Raises:
        InvalidSettings: There is no such strategy, it cannot be imported or made, or it lacks `build_batch`.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if ":" not in name:
        raise _refused(name, f"give one of {', '.join(BUILT_IN)}, or module:Class")
    kind = load_object(name, "batch_strategy")
    try:
        strategy = kind()
    except Exception as exc:  # a user's class may raise anything
        raise _refused(name, f"it cannot be made: {type(exc).__name__}: {exc}") from exc
    if not callable(getattr(strategy, "build_batch", None)):
        raise _refused(name, "it has no method build_batch")
    return strategy  # type: ignore[no-any-return]  # whatever it is, its batches are checked


def _refused(name: str, why: str) -> InvalidSettings:
    return InvalidSettings(f"--batch-strategy (LLAMAQ_BATCH_STRATEGY) {name!r}: {why}")
