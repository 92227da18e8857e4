"""The commands that start workers: help, options and errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.forked_scripts import run_script

from llamaq.common.logging_setup import LogFormat
from llamaq.worker.settings import WorkerSettings
from llamaq.worker_cli.start_worker_commands import example_command, note_demo_model

LLAMAQ = Path(sys.executable).with_name("llamaq")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAQ_")}
    environment = {**inherited, "COLUMNS": "200", "NO_COLOR": "1", **variables}
    return run_script([str(LLAMAQ), *arguments], cwd=Path.cwd(), variables=environment, timeout_s=60)


@pytest.mark.parametrize("command", ["worker", "up"])
def test_help_shows_every_setting_in_its_group_with_default_and_variable(command: str) -> None:
    shown = run(command, "--help", COLUMNS="400").stdout
    for name, field in WorkerSettings.model_fields.items():
        assert re.search(rf"│ --{name.replace('_', '-')} ", shown), name
        assert f"LLAMAQ_{name.upper()})" in shown, name
        default = field.get_default(call_default_factory=True, validated_data={})
        if default not in (None, ()):
            assert f"(default {default}; LLAMAQ_{name.upper()})" in shown, name
    titles = re.findall(r"╭─ (.*?) ─", shown)
    assert titles == [
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
    assert "--config" in shown


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


def test_an_unknown_flag_is_refused() -> None:
    ended = run("worker", "--n-slots", "4")
    assert ended.returncode == 2
    assert "--n-slots" in ended.stderr


def test_up_refuses_a_data_dir_for_a_redis_that_it_does_not_start(tmp_path: Path) -> None:
    ended = run("up", "--data-dir", str(tmp_path), "--redis-url", "redis://localhost:1/0")
    assert ended.returncode == 2
    assert "--data-dir: unset --redis-url (LLAMAQ_REDIS_URL)" in ended.stderr


def test_the_example_of_up_has_only_options_that_are_not_the_default() -> None:
    plain = WorkerSettings.model_construct(set())
    assert example_command(plain, None) == "llamaq generate 'Once upon a time'"
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
