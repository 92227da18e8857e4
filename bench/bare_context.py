"""A llama.cpp model and context with the options of a worker, and nothing else.

Run as a script, this module computes a full batch and prints the resident memory of the process in KiB. The imports are
those that llama.cpp's Python bindings need, so that this memory has no part of llamaq in it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping
from typing import Any

import llama_cpp

from process_memory import resident_kb

_discard_log = llama_cpp.llama_log_callback(lambda _level, _text, _user_data: None)


def load(path: str, n_gpu_layers: int, options: Mapping[str, int]) -> tuple[Any, Any]:
    """Return a model and a context of it. `options` are fields of `llama_context_params`."""
    llama_cpp.llama_log_set(_discard_log, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = n_gpu_layers
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    params.kv_unified = params.no_perf = True
    for name, value in options.items():
        setattr(params, name, value)
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise MemoryError(f"llama.cpp cannot load {path} or make a context with {dict(options)}")
    return model, context


def compute_batch(context: Any, n_tokens: int, n_sequences: int) -> None:
    """Compute the largest batch, with logits for one token of each sequence, so that all buffers are in use."""
    batch = llama_cpp.llama_batch_init(n_tokens, 0, 1)
    batch.n_tokens = n_tokens
    for index in range(n_tokens):
        batch.token[index] = 1
        batch.pos[index] = index // n_sequences
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = index % n_sequences
        batch.logits[index] = index >= n_tokens - n_sequences
    status = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    if status != 0:
        raise RuntimeError(f"llama_decode returned {status}")


def main() -> None:
    """Print the resident memory in KiB of this process with a context as `sys.argv[1]` describes it, in JSON."""
    described = json.loads(sys.argv[1])
    options = described["context"]
    model, context = load(described["model"], described["n_gpu_layers"], options)
    compute_batch(context, options["n_batch"], options["n_seq_max"])
    print(resident_kb("self"))
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


if __name__ == "__main__":
    main()
