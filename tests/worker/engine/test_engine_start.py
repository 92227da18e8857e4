"""What `Engine` and `Model` check, log and know when a model is loaded."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import pytest

from llamaq.common.errors import EngineError, ModelError
from llamaq.worker.engine import abi_check
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Context, Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions


def test_the_engine_has_the_limits_of_its_model_and_context(demo: Engine) -> None:
    assert (demo.context.n_ctx, demo.context.n_batch, demo.context.n_seq_max) == (1024, 128, 8)
    assert demo.context.n_vocab == demo.vocab.n_tokens
    assert demo.model.n_ctx_train >= 1024
    assert demo.model.quantization in repr(demo)
    assert repr(demo).endswith("n_ctx=1024 n_batch=128 seqs=8>")
    demo.close()
    demo.close()


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model file"):
        Model(tmp_path / "missing.gguf", ModelOptions(n_gpu_layers=0))
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ModelError, match="cannot load"):
        Model(tmp_path / "text.gguf", ModelOptions(n_gpu_layers=0))


@pytest.mark.parametrize("n_seq_max", [0, 65, 257])
def test_more_sequences_than_llama_cpp_allows_are_refused(chat_model: Path, n_seq_max: int) -> None:
    model = Model(chat_model, ModelOptions(n_gpu_layers=0))
    with pytest.raises(EngineError, match="sequences"):
        Context(model, ContextOptions(512, 64, 64, n_seq_max, 1, 1))
    model.close()


def test_the_log_of_llama_cpp_is_written_to_logging(chat_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "llamaq.worker.engine.llama_log"):
        Model(chat_model, ModelOptions(n_gpu_layers=0)).close()
    assert any("file format = GGUF V3" in record.getMessage() for record in caplog.records)
    assert not any("\n" in record.getMessage() for record in caplog.records)


def test_loading_a_model_writes_nothing_to_stderr(chat_model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from llamaq.worker.engine.engine import Engine;"
        "from llamaq.worker.engine.llama_bindings import Model;"
        "from llamaq.worker.engine.load_options import ContextOptions, ModelOptions;"
        "Engine(Model(Path(sys.argv[1]), ModelOptions(n_gpu_layers=0)), ContextOptions(4096, 64, 64, 2, 1, 1)).close()"
    )
    done = subprocess.run([sys.executable, "-c", code, chat_model], capture_output=True, timeout=60, check=True)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda patch: patch.setattr(llama_cpp, "__version__", "0.2.90"), "llamaq needs >=0.3.36"),
        (lambda patch: patch.setitem(abi_check._SIZES, "llama_batch", 64), "llama_batch has 56 bytes, not 64"),
        (lambda patch: patch.setitem(abi_check._CONTEXT_DEFAULTS, "n_batch", 512), "n_batch is 2048 by default"),
    ],
    ids=["version", "size", "default"],
)
def test_an_unsupported_llama_cpp_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], message: str
) -> None:
    abi_check.check_abi.cache_clear()
    change(monkeypatch)
    with pytest.raises(EngineError, match=message):
        abi_check.check_abi()
