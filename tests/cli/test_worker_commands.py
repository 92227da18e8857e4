"""The commands of a GPU host: help, options, errors, and the view of the demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from llamaq.cli.demo_view import DemoJob, DemoView, stats_table
from llamaq.cli.worker_commands import example_command
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.worker.settings import WorkerSettings

LLAMAQ = Path(sys.executable).with_name("llamaq")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAQ_")}
    environment = {**inherited, "COLUMNS": "200", "NO_COLOR": "1", **variables}
    command = [str(LLAMAQ), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


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
        "Slots and batches",
        "The prefix cache",
        "Leases, heartbeats and shutdown",
        "Sampling defaults",
    ]
    assert "--config" in shown


def test_a_bad_setting_is_one_line_and_no_traceback() -> None:
    ended = run("worker", "--n-parallel", "0", LLAMAQ_LEASE_S="soon")
    assert ended.returncode == 1
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


def test_the_example_of_up_has_only_options_that_are_not_the_default() -> None:
    plain = WorkerSettings.model_construct(set())
    assert example_command(plain, None) == "llamaq generate 'Once upon a time'"
    named = WorkerSettings(queue="stories")
    assert example_command(named, "redis://127.0.0.1:7/0") == (
        "llamaq generate 'Once upon a time' --queue stories --redis-url redis://127.0.0.1:7/0"
    )


# ---- the view of the demo


def demo_jobs(count: int) -> list[DemoJob]:
    made = [DemoJob(f"Job {index}", {"prompt": "Once"}) for index in range(count)]
    for index, job in enumerate(made):
        job.text, job.n_tokens = " upon a time" * 10 * index, 30 * index
    return made


def render(view: DemoView, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(view)
    return captured.get().splitlines()


@pytest.mark.parametrize(
    ("count", "width", "height"), [(8, 80, 24), (8, 200, 50), (64, 80, 24), (1, 80, 24), (3, 30, 8)]
)
def test_the_view_fits_its_terminal_with_panels_of_equal_height(count: int, width: int, height: int) -> None:
    lines = render(DemoView(demo_jobs(count)), width, height)
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    tops = [place for place, line in enumerate(lines) if line.startswith("╭")]
    assert len({after - before for before, after in zip(tops, [*tops[1:], len(lines) - 1], strict=True)}) == 1
    assert " tokens · " in lines[-1]


def test_a_panel_shows_the_end_of_the_text_and_the_progress() -> None:
    made = demo_jobs(2)
    made[1].text += " The end."
    lines = render(DemoView(made), 80, 24)
    assert any("The end." in line for line in lines)
    assert any("waiting, 0 tokens" in line and "running, 30 tokens" in line for line in lines)


def test_running_jobs_are_shown_before_ended_ones() -> None:
    made = demo_jobs(64)
    for job in made[:60]:
        job.ending = "stop"
    shown = "\n".join(render(DemoView(made), 80, 24))
    assert all(f"Job {index} " in shown for index in range(60, 64))


def test_generated_text_is_never_read_as_markup() -> None:
    made = demo_jobs(1)
    made[0].title, made[0].text, made[0].ending = "[bold]x[/]", "[red]hot[/red] [/nothing]", "[stop]"
    shown = "\n".join(render(DemoView(made), 80, 24))
    assert "[red]hot[/red] [/nothing]" in shown
    assert "[bold]x[/]" in shown
    console = Console(width=80)
    with console.capture() as captured:
        console.print(stats_table(made))
    assert "[bold]x[/]" in captured.get()


def test_the_table_of_stats_fits_80_columns_and_has_a_row_for_a_failed_job() -> None:
    made = demo_jobs(2)
    made[0].stats, made[0].ending = JobStats(prompt_tokens=12345, generated_tokens=12345, duration_ms=123456), "length"
    made[1].ending = "chat_template"
    console = Console(width=80)
    with console.capture() as captured:
        console.print(stats_table(made))
    shown = captured.get()
    assert "12345" in shown
    assert "chat_template" in shown
    assert made[1].has_failed
    assert "…" not in shown
