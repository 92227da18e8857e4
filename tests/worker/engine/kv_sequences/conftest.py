"""Engines with each kind of KV memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.kv_memory_kinds import KINDS, MakeEngine

from llamaq.tools.random_gguf import MEMORY_KINDS, write_model
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ModelOptions


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("memory")

    def write(name: str) -> Path:
        path = directory / f"{name}.gguf"
        return path if path.exists() else write_model(path, MEMORY_KINDS[name], seed=3)

    return write


@pytest.fixture
def make_engine(model_file: Callable[[str], Path]) -> Iterator[MakeEngine]:
    """Create engines by their names in `KINDS`, with changed options if given."""
    engines: list[Engine] = []

    def build(name: str, **changes: Any) -> Engine:
        options = replace(KINDS[name].options, **changes)
        engines.append(Engine(Model(model_file(KINDS[name].model), ModelOptions(n_gpu_layers=0)), options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind
