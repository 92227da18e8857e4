"""Checks that the library of llama.cpp can be loaded. Import no other module that uses it before this check."""

from __future__ import annotations

from llamaq.common.errors import EngineError


def check_library() -> None:
    """Load the library of llama.cpp.

    Raises:
        EngineError: It cannot be loaded.
    """
    try:
        import llama_cpp  # noqa: F401
    except (OSError, RuntimeError) as exc:
        raise EngineError(
            f"llama.cpp cannot be loaded: {exc}. A build for NVIDIA GPUs needs the NVIDIA driver; a container gets it "
            "with --gpus all"
        ) from exc
