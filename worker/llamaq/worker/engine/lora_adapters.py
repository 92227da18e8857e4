"""LoRA adapters: small files with changes of a model's weights, which llama.cpp adds while it computes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from llamaq.common.errors import EngineError, ModelError
from llamaq.worker.engine.scaled_file import ScaledFile


class LoadedAdapters:
    """The adapters of one model, in the memory of the model. llama.cpp frees them with the model.

    Args:
        model: Pointer to the llama_model.
        adapters: The adapters.

    Raises:
        ModelError: An adapter cannot be loaded or is not for this model.
    """

    def __init__(self, model: Any, adapters: Sequence[ScaledFile]) -> None:
        self._pointers = [_load(model, adapter.path) for adapter in adapters]
        self._scales = tuple(adapter.scale for adapter in adapters)

    def apply(self, context: Any, scales: tuple[float, ...] | None = None) -> None:
        """Let a llama_context of the model compute with the adapters from its next batch on.

        Args:
            context: Pointer to the llama_context.
            scales: The scale of each adapter. None: those of the adapters themselves.

        Raises:
            EngineError: llama.cpp cannot use them.
        """
        n_adapters = len(self._pointers)
        if not n_adapters:
            return
        pointers = (llama_cpp.llama_adapter_lora_p_ctypes * n_adapters)(*self._pointers)
        factors = (ctypes.c_float * n_adapters)(*(self._scales if scales is None else scales))
        if llama_cpp.llama_set_adapters_lora(context, pointers, n_adapters, factors):
            raise EngineError("--lora: llama.cpp cannot use the adapters; see its log for the reason")


def _load(model: Any, path: Path) -> Any:
    pointer = llama_cpp.llama_adapter_lora_init(model, str(path).encode())
    if not pointer:
        raise ModelError(
            f"--lora: llama.cpp cannot load {path} as an adapter of this model; see its log for the reason"
        )
    if llama_cpp.llama_adapter_get_alora_n_invocation_tokens(pointer):
        raise ModelError(
            f"--lora: {path} is an activated LoRA (aLoRA), which changes only the tokens after its invocation tokens; "
            "llamaq applies adapters to all tokens. Choose an ordinary LoRA adapter"
        )
    return pointer
