"""A worker whose model was replaced while it was loaded does not start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.control_vector_files import draw_directions, write_control_vector
from tests.support.lora_files import write_lora

from llamaq.common.errors import ModelError
from llamaq.worker.process import worker_process
from llamaq.worker.process.generation_parts import GenerationParts
from llamaq.worker.process.model_file_versions import ModelFileVersions
from llamaq.worker.process.worker_process import WorkerProcess
from llamaq.worker.settings import WorkerSettings


@pytest.fixture
def split_model(tmp_path: Path) -> Path:
    """The path of the first file of a model in two files."""
    paths = [tmp_path / f"model-{number:05}-of-00002.gguf" for number in (1, 2)]
    for path in paths:
        path.write_bytes(b"weights")
    return paths[0]


def test_a_change_of_each_file_of_a_model_is_noticed(split_model: Path, chat_model: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora.gguf", chat_model)
    vector = write_control_vector(tmp_path / "vector.gguf", draw_directions(chat_model, 1))
    settings = WorkerSettings(lora=(f"{lora}:0.5",), control_vector=(str(vector),))
    second = split_model.with_name("model-00002-of-00002.gguf")
    for path, setting in ((split_model, "model"), (second, "model"), (lora, "lora"), (vector, "control-vector")):
        versions = ModelFileVersions(split_model, settings)
        versions.check()
        path.write_bytes(b"other weights")
        with pytest.raises(ModelError, match=f"--{setting}: {path} was replaced"):
            versions.check()
    versions = ModelFileVersions(split_model, settings)
    second.unlink()
    with pytest.raises(ModelError, match=f"--model: {second} was replaced"):
        versions.check()


@pytest.mark.starts_processes  # it loads a model
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_worker_whose_model_is_replaced_while_it_is_loaded_does_not_start(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(demo_model, path)
    loaded: list[GenerationParts] = []

    def load(*args: Any) -> GenerationParts:
        loaded.append(GenerationParts(*args))
        if is_replaced:
            (tmp_path / "new.gguf").write_bytes(demo_model.read_bytes() + bytes(32))
            (tmp_path / "new.gguf").replace(path)
        return loaded[0]

    monkeypatch.setattr(worker_process, "GenerationParts", load)
    settings = WorkerSettings(model=str(path), n_ctx=256, n_threads=1, warmup=False)
    if is_replaced:
        with pytest.raises(ModelError, match=r"--model: .* was replaced while it was loaded; start the worker again"):
            WorkerProcess(settings)
    else:
        WorkerProcess(settings)
        loaded[0].close()
        loaded[0].free_model()
