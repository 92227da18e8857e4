"""The log of llama.cpp, and its first lines: which GPUs it has found."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import llama_cpp

from llamaq.worker.engine.log_line_joiner import LogLineJoiner

log = logging.getLogger(__name__)

_line_joiner = LogLineJoiner()


def _log(level: int, text: bytes, _user_data: Any) -> None:
    for line_level, line in _line_joiner.add(level, text.decode(errors="replace")):
        log.log(line_level, "llama.cpp: %s", line)


_log_callback = llama_cpp.llama_log_callback(_log)  # llama.cpp keeps a pointer to the callback


def route_log() -> None:
    """Send the log of llama.cpp to this module's logger."""
    llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p())


@cache
def has_gpu() -> bool:
    """Return whether this build of llama.cpp can offload layers to a GPU. The first call logs which GPUs it finds."""
    route_log()
    return bool(llama_cpp.llama_supports_gpu_offload())
