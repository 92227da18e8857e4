"""Loads plugins, built-in or from a module of the user: the batch strategy and the hooks that the settings name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from llamaq.common.errors import InvalidSettings
from llamaq.common.settings import ENV_PREFIX
from llamaq.worker.scheduling.strategies.batch_strategies import Balanced, BatchStrategy, DecodeMaximal, PrefillPriority
from llamaq.worker.scheduling.strategies.latency_target import DEFAULT_TARGET_ITL_MS, LatencyTarget


def load_object(spec: str, setting: str) -> Any:
    """Import an object from the code of a user. Its module may be in the working directory.

    Args:
        spec: The object, as `module:attribute`.
        setting: The name of the setting, for error messages.

    Raises:
        InvalidSettings: The form is wrong, or the import fails.
    """
    flag = f"--{setting.replace('_', '-')} ({ENV_PREFIX}{setting.upper()})"
    module, colon, attribute = spec.partition(":")
    if not (module and colon and attribute):
        raise InvalidSettings(f"{flag}: {spec!r} is not of the form module:attribute")
    _add_working_directory()
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as exc:  # a user's module may raise anything
        raise InvalidSettings(f"{flag}: {spec!r} cannot be loaded: {type(exc).__name__}: {exc}") from exc


def _add_working_directory() -> None:
    """Add the working directory to `sys.path`, as uvicorn does. Python does not add it for a console script."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)


def load_hooks(specs: tuple[str, ...]) -> list[Any]:
    """Return the functions that `--hooks` names.

    Args:
        specs: The functions, each as `module:attribute`.

    Raises:
        InvalidSettings: A hook cannot be imported or is not callable.
    """
    hooks = [load_object(spec, "hooks") for spec in specs]
    for spec, hook in zip(specs, hooks, strict=True):
        if not callable(hook):
            raise InvalidSettings(f"--hooks ({ENV_PREFIX}HOOKS): {spec!r} is not callable")
    return hooks


BUILT_IN: dict[str, type[BatchStrategy]] = {
    "decode-maximal": DecodeMaximal,
    "prefill-priority": PrefillPriority,
    "balanced": Balanced,
    "latency-target": LatencyTarget,
}


def load_strategy(name: str, target_itl_ms: float | None = None) -> BatchStrategy:
    """Return the batch strategy of this name.

    Args:
        name: A built-in strategy, or a user's class as `module:Class`, which is created without arguments.
        target_itl_ms: The target of `latency-target`. Other strategies ignore it. None: the default.

    Raises:
        InvalidSettings: The strategy does not exist, cannot be imported or created, or has no method `build_batch`.
    """
    if name == "latency-target":
        return LatencyTarget(target_itl_ms or DEFAULT_TARGET_ITL_MS)
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if ":" not in name:
        raise _invalid_strategy_error(name, f"give one of {', '.join(BUILT_IN)}, or module:Class")
    strategy_class = load_object(name, "batch_strategy")
    try:
        strategy = strategy_class()
    except Exception as exc:  # a user's class may raise anything
        raise _invalid_strategy_error(name, f"it cannot be created: {type(exc).__name__}: {exc}") from exc
    if not callable(getattr(strategy, "build_batch", None)):
        raise _invalid_strategy_error(name, "it has no method build_batch")
    return strategy  # type: ignore[no-any-return]  # any class is accepted, because the worker checks every batch


def _invalid_strategy_error(name: str, reason: str) -> InvalidSettings:
    return InvalidSettings(f"--batch-strategy ({ENV_PREFIX}BATCH_STRATEGY) {name!r}: {reason}")
