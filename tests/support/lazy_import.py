"""Imports a slow package for the first test of a module: every pytest process imports all test modules."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class LazyPackage:
    """Stands for a package, which is imported at the first access to one of its public attributes.

    `tests/conftest.py` imports it before the first test of the module, because the import takes seconds, and the event
    loop of a test would stand still meanwhile.

    When pytest collects a test module, it asks each object of the module for its class, and for special attributes such
    as `__test__`. A module of `importlib.util.LazyLoader` would be loaded then.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """Import the package."""
        return import_module(self._name)


def lazy_import(name: str) -> Any:
    """Return an object with the attributes of a package, which Python imports at the first access to one of them."""
    return LazyPackage(name)
