"""The settings of RoPE, from the environment to llama.cpp, and what a model computes with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from tests.support.llama_calls import recorded_context_params

from llamaq.worker.engine.llama_bindings import SUCCESS
from llamaq.worker.model_settings import RopeSettings
from llamaq.worker.process.generation_parts import load_engine
from llamaq.worker.settings import WorkerSettings, load_settings

SIZES: dict[str, Any] = {
    "n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_parallel": 1, "n_threads": 1, "n_gpu_layers": 0, "warmup": False
}  # fmt: skip
PROMPT = [5, 200, 31, 77, 600, 12, 9, 9, 45, 300] * 4

PARAMS = [
    ("rope_scaling", "none", "rope_scaling_type", llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE),
    ("rope_scaling", "linear", "rope_scaling_type", llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR),
    ("rope_scaling", "yarn", "rope_scaling_type", llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN),
    ("rope_scale", "4", "rope_freq_scale", 0.25),
    ("rope_freq_scale", "0.5", "rope_freq_scale", 0.5),
    ("rope_freq_base", "5000", "rope_freq_base", 5000),
    ("yarn_orig_ctx", "128", "yarn_orig_ctx", 128),
    ("yarn_ext_factor", "0.75", "yarn_ext_factor", 0.75),
    ("yarn_attn_factor", "1.5", "yarn_attn_factor", 1.5),
    ("yarn_beta_slow", "2", "yarn_beta_slow", 2),
    ("yarn_beta_fast", "16", "yarn_beta_fast", 16),
]
"""Settings with a value as in the environment, and the parameter of llama.cpp that this value changes."""


def context_params(model: Path, settings: WorkerSettings) -> dict[str, Any]:
    """Return the parameters with which the context of a worker is created."""
    with recorded_context_params() as recorded:
        load_engine(model, settings).close()
    (params,) = recorded
    return params


@pytest.fixture(scope="module")
def default_params(chat_model: Path) -> dict[str, Any]:
    return context_params(chat_model, load_settings(**SIZES))


@pytest.mark.parametrize(("setting", "value", "param", "expected"), PARAMS)
def test_a_setting_of_rope_is_one_parameter_of_the_context(
    chat_model: Path,
    default_params: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: str,
    param: str,
    expected: float,
) -> None:
    monkeypatch.setenv(f"LLAMAQ_{setting.upper()}", value)
    params = context_params(chat_model, load_settings(**SIZES))
    assert {name: one for name, one in params.items() if one != default_params[name]} == {param: expected}


def test_every_setting_of_rope_is_tested() -> None:
    assert {setting for setting, *_ in PARAMS} == set(RopeSettings.model_fields)


def test_llama_cpp_reports_the_rope_of_the_settings(chat_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    load_engine(chat_model, load_settings(rope_freq_base=5000, rope_scale=8, **SIZES)).close()
    reported = [line.split() for line in caplog.messages]
    assert ["freq_base", "=", "5000.0"] in [words[-3:] for words in reported]
    assert ["freq_scale", "=", "0.125"] in [words[-3:] for words in reported]


Logits = npt.NDArray[np.float32]
LogitsWith = Callable[..., Logits]


@pytest.fixture(scope="module")
def logits_with(demo_model: Path) -> LogitsWith:
    """A function that returns the logits after `PROMPT` of a worker with the given settings."""

    @cache
    def compute(**values: Any) -> Logits:
        engine = load_engine(demo_model, load_settings(**values, **SIZES))
        engine.context.batch.clear()
        engine.context.batch.add_chunk(PROMPT, 0, 0, has_row=True)
        assert engine.context.decode() == SUCCESS
        logits: Logits = engine.context.logits(1)[0].copy()
        engine.close()
        return logits

    return compute


def distance(one: Logits, other: Logits) -> float:
    """Return the largest difference of two logits, in standard deviations."""
    return float(np.abs(one - other).max() / other.std())


YARN = {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_orig_ctx": 64}


@pytest.mark.parametrize(
    ("values", "others"),
    [
        ({"rope_freq_base": 5000.0}, {}),
        ({"rope_scale": 4.0}, {}),
        ({"rope_freq_scale": 0.5}, {"rope_scale": 4.0}),
        (YARN, {"rope_scale": 4.0}),
        (YARN | {"yarn_orig_ctx": 16}, YARN),
        (YARN | {"yarn_ext_factor": 0.5}, YARN),
        (YARN | {"yarn_ext_factor": 0.0, "yarn_attn_factor": 1.5}, YARN | {"yarn_ext_factor": 0.0}),
        (YARN | {"yarn_beta_slow": 4.0}, YARN),
        (YARN | {"yarn_beta_fast": 4.0}, YARN),
    ],
    ids=lambda values: " ".join(map(str, values.values())),
)
def test_another_rope_changes_what_a_model_computes(
    logits_with: LogitsWith, values: dict[str, Any], others: dict[str, Any]
) -> None:
    assert distance(logits_with(**values), logits_with(**others)) > 0.3


def test_the_scale_of_rope_is_the_inverse_of_the_scale_of_its_frequencies(logits_with: LogitsWith) -> None:
    assert distance(logits_with(rope_scale=4.0), logits_with(rope_freq_scale=0.25)) == 0


def test_positions_are_not_scaled_if_the_scaling_is_none(logits_with: LogitsWith) -> None:
    assert distance(logits_with(rope_scaling="none", rope_scale=4.0), logits_with()) == 0
