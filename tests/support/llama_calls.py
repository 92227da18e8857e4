"""Records what is passed to llama.cpp. The calls are made nevertheless."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp
import pytest


@contextmanager
def recorded_context_params() -> Iterator[list[dict[str, Any]]]:
    """Yield a list. It gets the numbers of each `llama_context_params` with which a context is created meanwhile."""
    recorded: list[dict[str, Any]] = []
    create = llama_cpp.llama_init_from_model

    def record(model: Any, params: Any) -> Any:
        fields = {name: getattr(params, name) for name, *_ in params._fields_}
        recorded.append({name: value for name, value in fields.items() if isinstance(value, int | float)})
        return create(model, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_cpp, "llama_init_from_model", record)
        yield recorded


@contextmanager
def recorded_batches() -> Iterator[list[int]]:
    """Yield a list. It gets the number of tokens of each batch that is decoded meanwhile."""
    recorded: list[int] = []
    decode = llama_cpp.llama_decode

    def record(context: Any, batch: Any) -> Any:
        recorded.append(batch.n_tokens)
        return decode(context, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_cpp, "llama_decode", record)
        yield recorded
