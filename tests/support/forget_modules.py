"""Lets modules be imported a second time in one test."""

from __future__ import annotations

import sys

import pytest


def forget_modules(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make the next import of these modules, and of all modules inside them, execute them again.

    After the test, `sys.modules` has its earlier content. The attributes of the packages that contain these modules are
    restored too, because an import also sets them.
    """
    for name in names:
        parent, _, attribute = name.rpartition(".")
        if name in sys.modules:
            monkeypatch.setattr(sys.modules[parent], attribute, sys.modules[name])
        for loaded in [loaded for loaded in sys.modules if loaded == name or loaded.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
