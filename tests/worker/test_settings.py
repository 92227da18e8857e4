"""Settings of a worker: their sources and their order, and errors that name the flag and the variable."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from llamaq.common.errors import InvalidSettings
from llamaq.worker.cpu_cores import usable_cores
from llamaq.worker.settings import WorkerSettings, load_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LLAMAQ_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "worker.toml"
    path.write_text('queue = "from-file"\nn_ctx = 1024\nlease_s = 7\ndevices = [1, 2]\nhooks = ["m:f"]\n')
    return path


def test_without_flags_and_variables_all_settings_are_defaults() -> None:
    settings = load_settings()
    assert settings == WorkerSettings()
    assert settings.model_fields_set == set()
    assert (settings.queue, settings.n_ctx, settings.model) == ("default", 8192, None)
    assert (settings.n_threads, settings.n_threads_alone) == (None, usable_cores())


def test_flags_win_over_variables_over_the_file_over_defaults(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAQ_N_CTX", "2048")
    monkeypatch.setenv("LLAMAQ_LEASE_S", "8")
    settings = load_settings(config, lease_s=9.0, n_parallel=None)
    assert settings.queue == "from-file"
    assert settings.n_ctx == 2048
    assert settings.lease_s == 9.0
    assert settings.n_parallel == 4, "None stands for a flag that was not given"
    assert settings.model_fields_set == {"queue", "n_ctx", "lease_s", "devices", "hooks"}


def test_lists_are_separated_by_commas_or_are_toml_arrays(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(config)
    assert settings.devices == (1, 2)
    assert settings.hooks == ("m:f",)
    monkeypatch.setenv("LLAMAQ_HOOKS", "a:b, c:d,")
    settings = load_settings(config, devices="0,3")
    assert settings.devices == (0, 3)
    assert settings.hooks == ("a:b", "c:d")


def test_the_file_of_one_call_does_not_affect_the_next_call(config: Path) -> None:
    assert load_settings(config).n_ctx == 1024
    assert load_settings().n_ctx == 8192


def test_settings_as_json_are_read_unchanged_by_a_child_process() -> None:
    settings = load_settings(devices="0,3", temperature=0.1, model="x.gguf")
    assert WorkerSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"n_parallel": 0}, "--n-parallel (LLAMAQ_N_PARALLEL): Input should be greater than or equal to 1, got '0'"),
        ({"n_parallel": 257}, "--n-parallel (LLAMAQ_N_PARALLEL)"),
        ({"temperature": -1.0}, "--temperature (LLAMAQ_TEMPERATURE)"),
        ({"temperature": float("nan")}, "--temperature (LLAMAQ_TEMPERATURE)"),
        ({"queue": "no spaces"}, "--queue (LLAMAQ_QUEUE)"),
        ({"log_level": "loud"}, "--log-level (LLAMAQ_LOG_LEVEL)"),
        ({"devices": "0,0"}, "--devices (LLAMAQ_DEVICES): a device is listed twice"),
        ({"devices": "0,x"}, "--devices"),
        (
            {"n_parallel": 8, "n_batch": 4},
            "--n-parallel (LLAMAQ_N_PARALLEL): 8 slots need a batch of at least as many tokens",
        ),
        ({"n_batch": 4096, "n_ctx": 2048}, "--n-batch (LLAMAQ_N_BATCH): 4096 is more than --n-ctx 2048"),
        ({"n_ctx": 2**32 + 512}, "--n-ctx (LLAMAQ_N_CTX)"),
        ({"n_ubatch": 2**32 + 1}, "--n-ubatch (LLAMAQ_N_UBATCH)"),
        ({"n_threads": 100_000}, "--n-threads (LLAMAQ_N_THREADS)"),
        ({"n_threads_batch": 100_000}, "--n-threads-batch (LLAMAQ_N_THREADS_BATCH)"),
        ({"n_threads_draft": 100_000}, "--n-threads-draft (LLAMAQ_N_THREADS_DRAFT)"),
        ({"n_gpu_layers": 2**32}, "--n-gpu-layers (LLAMAQ_N_GPU_LAYERS)"),
        ({"n_gpu_layers_draft": 2**32}, "--n-gpu-layers-draft (LLAMAQ_N_GPU_LAYERS_DRAFT)"),
        ({"main_gpu": 2**32}, "--main-gpu (LLAMAQ_MAIN_GPU)"),
        ({"yarn_orig_ctx": 2**32}, "--yarn-orig-ctx (LLAMAQ_YARN_ORIG_CTX)"),
        ({"lease_s": 1e16}, "--lease-s (LLAMAQ_LEASE_S)"),
        ({"heartbeat_s": 1e-9}, "--heartbeat-s (LLAMAQ_HEARTBEAT_S)"),
        ({"pooling": "mean"}, "--pooling (LLAMAQ_POOLING): only a worker with --embeddings pools"),
    ],
)
def test_the_error_of_an_invalid_flag_also_names_its_variable(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        load_settings(**flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_error_of_an_invalid_variable_also_names_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAQ_LEASE_S", "soon")
    with pytest.raises(InvalidSettings, match=r"--lease-s \(LLAMAQ_LEASE_S\): .*got 'soon'"):
        load_settings()


def test_one_error_names_all_invalid_settings() -> None:
    with pytest.raises(InvalidSettings) as caught:
        load_settings(n_ctx=1, top_p=2.0)
    assert "--n-ctx" in str(caught.value)
    assert "--top-p" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n_ctxx = 5", "n_ctxx: there is no such setting"),
        ("n_ctx = ", "Invalid value"),
        ("[worker]\nn_ctx = 1024", "worker"),
        ('n_ctx = "many"', "--n-ctx (LLAMAQ_N_CTX)"),
    ],
)
def test_a_file_with_an_unknown_key_or_bad_value_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(InvalidSettings) as caught:
        load_settings(path)
    assert message in str(caught.value)


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="--config: there is no file"):
        load_settings(tmp_path / "nowhere.toml")


def test_a_file_that_the_system_cannot_look_up_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="--config: "):
        load_settings(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("name", ["is_file", "open"])
def test_a_file_that_the_user_may_not_look_up_or_read_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(path: Path, **_: object) -> Any:  # root may read every file
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(InvalidSettings, match=r"--config: .*worker\.toml.* Permission denied"):
        load_settings(config)


def test_a_variable_of_a_client_setting_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAQ_TIMEOUT_S", "5")  # a setting of clients
    assert load_settings() == WorkerSettings()


def test_the_batch_is_the_context_but_at_most_2048_tokens() -> None:
    assert WorkerSettings(n_ctx=512).batch_budget == 512
    assert WorkerSettings(n_ctx=100_000).batch_budget == 2048
    assert WorkerSettings(n_batch=4096).batch_budget == 4096


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        ({}, set()),
        ({"cpu_mask": "f0"}, {4, 5, 6, 7}),
        ({"cpu_mask": "0x5"}, {0, 2}),
        ({"cpu_range": "4-7"}, {4, 5, 6, 7}),
        ({"cpu_mask": "1", "cpu_range": "511-511"}, {0, 511}),
    ],
)
def test_cpus_are_a_mask_and_a_range(cpus: dict[str, str], expected: set[int]) -> None:
    assert WorkerSettings.model_validate(cpus).cpus == expected


@pytest.mark.parametrize(
    "wrong",
    [
        *({"cpu_mask": mask} for mask in ("", "0", "g", "-1", "f" * 200)),
        *({"cpu_range": cpus} for cpus in ("", "4", "7-4", "-4", "4-", "0-512", "a-b")),
        {"cpu_strict": True},
        {"prio": 4},
        {"poll": 101},
    ],
)
def test_wrong_cpus_and_threads_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}|{name}"):
        WorkerSettings.model_validate(wrong)


def test_contradicting_model_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--cache-type-v .* needs flash attention"):
        WorkerSettings(cache_type_v="q8_0", flash_attn="off")
    with pytest.raises(ValueError, match="--rope-scale and --rope-freq-scale"):
        WorkerSettings(rope_scale=4, rope_freq_scale=0.25)
    with pytest.raises(ValueError, match=r"--use-direct-io .* excludes --use-mmap and --use-mlock"):
        WorkerSettings(use_direct_io=True, use_mlock=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("style.gguf", [("style.gguf", 1.0)]),
        ("a.gguf:0.5, hf:owner/repo/b.gguf:-2", [("a.gguf", 0.5), ("hf:owner/repo/b.gguf", -2.0)]),
        ("hf:owner/repo/b.gguf,c:nan", [("hf:owner/repo/b.gguf", 1.0), ("c:nan", 1.0)]),
    ],
)
def test_an_adapter_or_a_control_vector_may_have_a_scale(text: str, expected: list[tuple[str, float]]) -> None:
    assert list(WorkerSettings.model_validate({"lora": text}).lora_scales) == expected
    assert list(WorkerSettings.model_validate({"control_vector": text}).control_vector_scales) == expected


@pytest.mark.parametrize("name", ["lora", "control_vector"])
def test_a_scale_that_llama_cpp_cannot_store_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"the scale of a\.gguf is too large"):
        WorkerSettings.model_validate({name: f"a.gguf:{'9' * 400}"})


def test_the_layers_of_control_vectors_are_a_range() -> None:
    given = {"control_vector": "a.gguf", "control_vector_layer_range": "10, 24"}
    assert WorkerSettings.model_validate(given).control_vector_layer_range == (10, 24)


@pytest.mark.parametrize("layers", ["24,10", "10", "0,3", "1,2,3", "first,last", "1,513"])
def test_another_range_of_layers_is_refused(layers: str) -> None:
    with pytest.raises(ValueError, match=r"control.vector.layer.range"):
        WorkerSettings.model_validate({"control_vector": "a.gguf", "control_vector_layer_range": layers})


def test_a_range_of_layers_without_a_control_vector_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--control-vector-layer-range .*--control-vector"):
        WorkerSettings.model_validate({"control_vector_layer_range": "1,2"})


def test_a_chat_template_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="--chat-template-file"):
        _ = WorkerSettings(chat_template_file=tmp_path / "missing.jinja").chat_template_text


def test_lists_are_separated_by_commas() -> None:
    settings = WorkerSettings.model_validate({"tensor_split": "3,1", "override_tensor": "exps=CPU, a=B"})
    assert (settings.tensor_split, settings.override_tensor) == ((3.0, 1.0), ("exps=CPU", "a=B"))


def test_a_lease_has_at_least_four_heartbeats() -> None:
    assert load_settings(heartbeat_s=30, lease_s=10).beat_s == 2.5
    assert load_settings(heartbeat_s=1, lease_s=10).beat_s == 1


def test_settings_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        setattr(WorkerSettings(), "n_ctx", 1)  # noqa: B010  # mypy rejects a plain assignment


def test_minus_one_gpu_layers_are_all_layers() -> None:
    assert load_settings(n_gpu_layers=-1).n_gpu_layers == load_settings().n_gpu_layers == -1
    with pytest.raises(InvalidSettings, match="--n-gpu-layers"):
        load_settings(n_gpu_layers=-2)


def test_a_worker_has_defaults_for_the_seed_and_the_grammar_of_jobs() -> None:
    defaults = load_settings(seed=7, grammar='start ::= "x"', grammar_root="start", temperature=0.5).job_defaults
    assert (defaults.seed, defaults.grammar_root, defaults.temperature) == (7, "start", 0.5)
    with pytest.raises(InvalidSettings, match="--grammar-root"):
        load_settings(grammar_root="1")


def test_backend_sampling_and_speculation_exclude_each_other() -> None:
    with pytest.raises(InvalidSettings, match=r"--backend-sampling .*not possible with --speculation"):
        load_settings(backend_sampling=True, speculation="ngram")
    assert load_settings(backend_sampling=True).backend_sampling
