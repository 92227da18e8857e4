"""The commands that start workers: help, options and errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import llamaq
from tests.support.forked_scripts import run_script

from llamaq.common.logging_setup import LogFormat
from llamaq.worker.process import child_main
from llamaq.worker.process.exit_codes import EXIT_OK
from llamaq.worker.settings import WorkerSettings
from llamaq.worker_cli import start_worker_commands
from llamaq.worker_cli.start_worker_commands import example_command, note_demo_model

LLAMAQ = Path(sys.executable).with_name("llamaq")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAQ_")}
    environment = {**inherited, "COLUMNS": "200", "NO_COLOR": "1", **variables}
    return run_script([str(LLAMAQ), *arguments], cwd=Path.cwd(), variables=environment, timeout_s=60)


SECTIONS = [
    "Options",
    "Redis and the queue",
    "Model and context",
    "Threads",
    "GPUs and memory",
    "Positions beyond the context that the model was trained on",
    "Slots, batches and waiting jobs",
    "Speculation",
    "The prefix cache",
    "Leases, heartbeats and shutdown",
    "Stored output, retries and disconnected clients",
    "Hooks, logs and metrics",
    "Defaults of jobs",
]


@pytest.mark.parametrize("command", ["worker", "up"])
def test_help_shows_every_setting_in_its_group_with_default_and_variable(command: str) -> None:
    shown = run(command, "--help", COLUMNS="400").stdout
    for name, field in WorkerSettings.model_fields.items():
        assert re.search(rf"│ --{name.replace('_', '-')} ", shown), name
        assert f"LLAMAQ_{name.upper()})" in shown, name
        default = field.get_default(call_default_factory=True, validated_data={})
        if default not in (None, ()):
            assert f"(default {default}; LLAMAQ_{name.upper()})" in shown, name
    assert re.findall(r"╭─ (.*?) ─", shown) == SECTIONS
    assert "--config" in shown


@pytest.mark.parametrize("command", ["worker", "up"])
def test_help_in_a_narrow_terminal_has_the_same_sections(command: str) -> None:
    shown = run(command, "--help", COLUMNS="80").stdout
    assert re.findall(r"^(\w.*):$", shown, re.MULTILINE) == SECTIONS
    model, _, threads = shown.partition("\nModel and context:\n")[2].partition("\nThreads:\n")
    assert "  --model <str>" in model
    assert "  --n-threads <int>" in threads


def test_an_invalid_setting_prints_one_line_without_a_traceback() -> None:
    ended = run("worker", "--n-parallel", "0", LLAMAQ_LEASE_S="soon")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("llamaq: ")
    assert "--n-parallel (LLAMAQ_N_PARALLEL)" in line
    assert "--lease-s (LLAMAQ_LEASE_S)" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "no-such.gguf"), "--model: there is no file 'no-such.gguf'"),
        (("--model", "hf:nonsense"), "is not of the form hf:OWNER/REPO/FILE.gguf"),
        (("--batch-strategy", "fastest"), "--batch-strategy (LLAMAQ_BATCH_STRATEGY) 'fastest'"),
        (("--hooks", "nowhere:hook"), "--hooks (LLAMAQ_HOOKS): 'nowhere:hook'"),
        (("--redis-url", "http://localhost"), "--redis-url (LLAMAQ_REDIS_URL)"),
    ],
)
def test_a_worker_that_cannot_start_logs_the_reason_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    ended = run("worker", *arguments)
    assert ended.returncode == 2
    (line,) = (line for line in ended.stderr.splitlines() if " ERROR " in line)
    assert message in line
    assert "Traceback" not in ended.stderr


def test_the_flags_of_llama_cpp_are_settings_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[WorkerSettings] = []

    def serve(settings: WorkerSettings) -> int:
        served.append(settings)
        return EXIT_OK

    monkeypatch.setattr(start_worker_commands, "configure_logging", lambda *_: None)
    monkeypatch.setattr(child_main, "check_and_serve", serve)
    flags: dict[str, tuple[list[str], Any]] = {
        "rope_scaling": (["--rope-scaling", "yarn"], "yarn"),
        "rope_scale": (["--rope-scale", "4"], 4),
        "rope_freq_base": (["--rope-freq-base", "5000.5"], 5000.5),
        "yarn_orig_ctx": (["--yarn-orig-ctx", "128"], 128),
        "yarn_ext_factor": (["--yarn-ext-factor", "0.5"], 0.5),
        "yarn_attn_factor": (["--yarn-attn-factor", "1.5"], 1.5),
        "yarn_beta_slow": (["--yarn-beta-slow", "-1"], -1),
        "yarn_beta_fast": (["--yarn-beta-fast=16"], 16),
        "numa": (["--numa", "isolate"], "isolate"),
        "main_gpu": (["--main-gpu", "2"], 2),
        "split_mode": (["--split-mode", "row"], "row"),
        "tensor_split": (["--tensor-split", "3,0.5"], (3, 0.5)),
        "override_tensor": (["--override-tensor", "ffn=CPU,attn=CPU"], ("ffn=CPU", "attn=CPU")),
        "use_mmap": (["--no-use-mmap"], False),
        "use_mlock": (["--use-mlock"], True),
        "warmup": (["--no-warmup"], False),
        "chat_template_file": (["--chat-template-file", "chat.jinja"], Path("chat.jinja")),
    }
    llamaq("worker", "--no-supervise", "--model", "x.gguf", *(word for words, _ in flags.values() for word in words))
    (settings,) = served
    assert {name: getattr(settings, name) for name in flags} == {name: value for name, (_, value) in flags.items()}


def test_an_unknown_flag_is_refused() -> None:
    ended = run("worker", "--n-slots", "4")
    assert ended.returncode == 2
    assert "--n-slots" in ended.stderr


def test_up_refuses_a_data_dir_for_a_redis_that_it_does_not_start(tmp_path: Path) -> None:
    ended = run("up", "--data-dir", str(tmp_path), "--redis-url", "redis://localhost:1/0")
    assert ended.returncode == 2
    assert "--data-dir: unset --redis-url (LLAMAQ_REDIS_URL)" in ended.stderr


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_up_refuses_a_number_that_is_no_port(port: str) -> None:
    ended = run("up", "--port", port)
    assert ended.returncode == 2
    assert "Invalid value for '--port'" in ended.stderr


def test_the_example_of_up_has_only_options_that_are_not_the_default() -> None:
    plain = WorkerSettings.model_construct(set())
    assert example_command(plain, None) == "llamaq generate 'Once upon a time'"
    assert example_command(WorkerSettings(key_prefix="foo"), None) == (
        "LLAMAQ_KEY_PREFIX=foo llamaq generate 'Once upon a time'"
    )
    named = WorkerSettings(queue="stories")
    assert example_command(named, "redis://127.0.0.1:7/0") == (
        "llamaq generate 'Once upon a time' --queue stories --redis-url redis://127.0.0.1:7/0"
    )


@pytest.mark.parametrize("form", LogFormat)
def test_a_note_for_the_user_is_a_log_message_if_the_log_has_the_form_of_json(
    form: LogFormat, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("INFO"):
        note_demo_model(WorkerSettings(log_format=form))
    printed, logged = capsys.readouterr().err, caplog.text
    assert ("No --model given" in printed, "No --model given" in logged) == (
        form is LogFormat.TEXT,
        form is LogFormat.JSON,
    )
