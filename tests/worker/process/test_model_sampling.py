from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from llamaq.tools.random_gguf import PLAIN, write_model
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ModelOptions
from llamaq.worker.process.model_sampling import job_defaults_for_model
from llamaq.worker.settings import WorkerSettings, load_settings

FILE = {
    "general.sampling.temp": "0.600000",
    "general.sampling.top_k": "20",
    "general.sampling.penalty_repeat": "1.05",
    "general.sampling.sequence": "top_k;top_p;temperature",
    "general.sampling.min_p": "seven",
}


def test_the_settings_of_the_user_then_the_file_then_llamaq_give_the_defaults(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAQ_TOP_K", "5")
    defaults = job_defaults_for_model(load_settings(repeat_penalty=1.2), FILE.get)
    assert (defaults.top_k, defaults.repeat_penalty) == (5, 1.2)
    assert (defaults.temperature, defaults.samplers) == (0.6, ("top_k", "top_p", "temperature"))
    assert (defaults.top_p, defaults.min_p) == (0.95, 0.05)
    assert "general.sampling.min_p value='seven'" in caplog.text


@pytest.mark.parametrize(("text", "expected", "n_warnings"), [("-1", 0, 0), ("0", 0, 0), ("7", 7, 0), ("-x", 40, 1)])
def test_a_top_k_below_0_keeps_all_tokens_as_in_llama_cpp(
    caplog: pytest.LogCaptureFixture, text: str, expected: int, n_warnings: int
) -> None:
    defaults = job_defaults_for_model(load_settings(), {"general.sampling.top_k": text}.get)
    assert defaults.top_k == expected
    assert caplog.text.count("model.bad_sampling") == n_warnings


def test_the_file_can_be_ignored() -> None:
    settings = load_settings(model_sampling=False)
    assert job_defaults_for_model(settings, FILE.get) == settings.job_defaults


def test_a_child_process_knows_which_settings_were_given() -> None:
    line = load_settings(temperature=0.8).model_dump_json(exclude_unset=True)
    defaults = job_defaults_for_model(WorkerSettings.model_validate_json(line), FILE.get)
    assert (defaults.temperature, defaults.top_k) == (0.8, 20)


@pytest.mark.starts_processes  # loads a model
def test_llama_cpp_reads_the_values_of_a_file(tmp_path: Path) -> None:
    spec = dataclasses.replace(PLAIN, sampling=(("temp", "0.5"), ("sequence", "top_k")))
    model = Model(write_model(tmp_path / "model.gguf", spec), ModelOptions())
    defaults = job_defaults_for_model(load_settings(), model.metadata)
    model.close()
    assert (defaults.temperature, defaults.samplers, defaults.top_k) == (0.5, ("top_k",), 40)
