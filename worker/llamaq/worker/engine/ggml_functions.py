"""Functions of ggml that llama_cpp, the Python package, does not declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_cpp import _ggml


def declare(functions: Mapping[str, tuple[list[Any], Any]]) -> Any:
    """Return ggml's library, after some of its functions got their C types.

    Args:
        functions: The types of the arguments and of the result of each function, by its name.
    """
    library = _ggml.libggml
    for name, (argument_types, result_type) in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argument_types, result_type
    return library
