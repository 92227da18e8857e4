"""Imports pyarrow, which reads and writes Parquet files, and .zst files before Python 3.14."""

from __future__ import annotations

import importlib
from typing import Any

from llamaq.common.errors import MissingExtra


def pyarrow_module(name: str, feature: str = "a Parquet file") -> Any:
    """Import a module of pyarrow.

    Args:
        name: The full name of the module.
        feature: What needs the module, for the error.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        raise MissingExtra(feature, "parquet") from exc
