"""What llama.cpp logs when a worker starts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from llamaq.worker.engine.llama_bindings import Context, Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions


def test_the_shipped_model_starts_without_a_warning_of_llama_cpp(
    demo_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    model = Model(demo_model, ModelOptions(n_gpu_layers=0))
    assert model.n_ctx_train < 8192  # the default of n_ctx, which several jobs share
    options = ContextOptions(n_ctx=8192, n_batch=64, n_ubatch=64, n_seq_max=4, n_threads=1, n_threads_batch=1)
    Context(model, options).close()
    model.close()
    assert len(caplog.records) > 10
    assert [record.message for record in caplog.records if record.levelno > logging.DEBUG] == []
