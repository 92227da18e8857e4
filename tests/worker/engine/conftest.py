"""Engines with the options of `tests.support.engine_ticks`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.engine_ticks import OPTIONS

from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ModelOptions


@pytest.fixture
def engine(any_model: Path) -> Iterator[Engine]:
    engine = Engine(Model(any_model, ModelOptions(n_gpu_layers=0)), OPTIONS)
    yield engine
    engine.close()


@pytest.fixture
def demo(demo_model: Path) -> Iterator[Engine]:
    engine = Engine(Model(demo_model, ModelOptions(n_gpu_layers=0)), OPTIONS)
    yield engine
    engine.close()
