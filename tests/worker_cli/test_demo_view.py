"""The view of `llamaq demo` fits its terminal, shows running jobs first, and draws generated text unchanged."""

from __future__ import annotations

import pytest
from rich.console import Console

from llamaq.producer import JobStats
from llamaq.worker_cli.demo_view import DemoJob, DemoView, stats_table


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


def test_generated_text_is_not_parsed_as_markup() -> None:
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
