"""The screen of `llamaq top`, with fictitious queues and pressed keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.top_readings import (
    NOW_MS,
    job_id,
    make_letter,
    make_queue,
    make_reading,
    make_recent,
    make_summary,
    make_worker,
)
from textual.pilot import Pilot

from llamaq.cli.top.app import TopApp
from llamaq.cli.top.reading_types import Reading
from llamaq.cli.top.row_list import RowList
from llamaq.cli.top.table_columns import WORKERS
from llamaq.common.errors import LlamaqError

NEVER_S = 1e6
"""The interval of the readings: a test asks for each of them."""


class FakeQueues:
    """Returns a reading, and records what the view asks for."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.error: Exception | None = None
        self.asked: list[tuple[str, str]] = []
        self.wanted: list[tuple[bool, bool]] = []

    async def read(self, *, with_waiting: bool = False, with_dead: bool = False) -> Reading:
        self.wanted.append((with_waiting, with_dead))
        if self.error is not None:
            raise self.error
        return self.reading

    async def pause(self, queue: str) -> None:
        self.asked.append(("pause", queue))

    async def resume(self, queue: str) -> None:
        self.asked.append(("resume", queue))

    async def cancel(self, job_id: str) -> bool:
        self.asked.append(("cancel", job_id))
        return True

    async def retry(self, letter_id: str) -> str:
        self.asked.append(("retry", letter_id))
        raise LlamaqError("the request has expired")


@pytest.fixture
def queues() -> FakeQueues:
    """Two queues; `chat` has 30 workers, of which the first runs two jobs."""
    first = make_worker("w00", jobs={0: (job_id("chat", 1), 3), 1: (job_id("chat", 2), 4)})
    workers = (first, *(make_worker(f"w{number:02}", n_parallel=1) for number in range(1, 30)))
    recent = (make_recent("chat", 7, ended_ms=NOW_MS - 1000, error_code="internal"),)
    listed, dead = (make_summary("chat", 9),), (make_letter("chat", 5), make_letter("chat", 6, is_job=False))
    chat = make_queue(waiting=8, running=2, workers=workers, recent=recent, listed=listed, dead=dead)
    return FakeQueues(make_reading(chat, make_queue("bulk", mode="paused")))


def screen(app: TopApp) -> list[str]:
    """Return the lines of text on the screen."""
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]


def line_of(app: TopApp, text: str) -> str:
    """Return the only line on the screen that contains a text."""
    (found,) = [line for line in screen(app) if text in line]
    return found


async def wait_for(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    while not condition():
        await pilot.pause(0.01)


async def started(app: TopApp, pilot: Pilot[None]) -> None:
    """Wait until the first reading is on the screen."""
    await wait_for(pilot, lambda: app.overview)
    await pilot.pause()


async def test_the_pages_show_workers_slots_jobs_and_dead_letters_in_80_columns(queues: FakeQueues) -> None:
    app = TopApp(queues, "host:6379/0", NEVER_S)
    async with app.run_test(size=(80, 24)) as pilot:
        await started(app, pilot)
        lines = screen(app)
        assert len(lines) == 24
        assert "8 waiting · 2 running · 30 workers · 2/33 slots" in lines[0]
        assert [line.split()[0] for line in lines[1:5]] == ["queue", "(all)", "chat", "bulk"]
        assert line_of(app, "w00 ").split()[1:2] == ["2/4"]
        assert "1-14 of 30" in line_of(app, "1 workers")
        await pilot.press("2")
        assert [line.split()[:3] for line in screen(app) if " decode " in line] == [
            ["w00", "0", "decode"],
            ["w00", "1", "decode"],
        ]
        await pilot.press("right")
        await wait_for(pilot, lambda: queues.wanted[-1] == (True, False))
        assert "interactive" in line_of(app, " now")
        await pilot.press("4")
        assert line_of(app, " 7 ").split()[0] == "internal"
        await pilot.press("5")
        await wait_for(pilot, lambda: queues.wanted[-1] == (False, True))
        await pilot.pause()
        assert "three workers died" in line_of(app, job_id("chat", 5)[-10:] + " ")
        await pilot.press("q")
    assert app.return_code == 0


@pytest.mark.slow
async def test_rows_are_paged_sorted_and_filtered(queues: FakeQueues) -> None:
    app = TopApp(queues, "host", NEVER_S)
    async with app.run_test(size=(80, 24)) as pilot:
        await started(app, pilot)
        rows = app.query_one("#rows", RowList)

        def selected() -> str:
            assert rows.selected is not None
            return rows.table.key(rows.selected)

        await pilot.press("pagedown")
        assert selected() == "w14"
        await pilot.press("end", "up")
        assert selected() == "w28"
        await pilot.press("s")
        assert "by worker" in line_of(app, "1 workers")
        assert selected() == "w28", "the cursor stays on its line"
        await pilot.press("S", "home")
        assert selected() == "w29"
        await pilot.press("slash", *"spct3w1")
        assert (len(rows.lines), rows.table) == (0, WORKERS), "letters and digits in the filter are no commands"
        await pilot.press(*["backspace"] * 7, *"w1", "enter")
        assert len(rows.lines) == 10
        assert "/w1" in line_of(app, "1 workers")
        await pilot.press("escape", "S", "home", "enter")
        assert "/w00" in line_of(app, "1 workers"), "Enter on a worker shows its slots"
        assert len(rows.lines) == 2
        await pilot.click(rows, offset=(5, 2))
        assert selected() == job_id("chat", 2)
        assert job_id("chat", 2) in line_of(app, " in slot 1 of w00")
        for size in ((120, 10), (12, 4)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert selected() == job_id("chat", 2)


async def test_the_table_of_queues_selects_the_queue_that_is_shown_and_paused(queues: FakeQueues) -> None:
    app = TopApp(queues, "host", NEVER_S)
    async with app.run_test(size=(80, 24)) as pilot:
        await started(app, pilot)
        rows = app.query_one("#rows", RowList)
        await pilot.press("p")
        assert queues.asked == [], "the sum of all queues cannot be paused"
        app.query_one("#queues").focus()
        await pilot.press("down")
        assert len(rows.lines) == 30
        await pilot.press("p", "y", "down")
        assert len(rows.lines) == 0
        await pilot.press("p")
        await wait_for(pilot, lambda: len(queues.asked) == 2)
        assert queues.asked == [("pause", "chat"), ("resume", "bulk")]


@pytest.mark.slow
async def test_a_job_is_cancelled_and_a_dead_letter_retried_only_after_a_yes(queues: FakeQueues) -> None:
    app = TopApp(queues, "host", NEVER_S)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await started(app, pilot)
        await pilot.press("c")
        assert len(app.screen_stack) == 1, "a worker is no job"
        await pilot.press("2", "c")
        await pilot.pause()
        assert f"Cancel job {job_id('chat', 1)}" in line_of(app, "Cancel job chat.")
        before = app.overview
        app._wake.set()
        await wait_for(pilot, lambda: app.overview is not before)  # while the question is open
        await pilot.press("1")
        await pilot.press("n")
        assert queues.asked == []
        await pilot.press("c", "y")
        await wait_for(pilot, lambda: queues.asked)
        assert queues.asked == [("cancel", job_id("chat", 1))]
        await pilot.press("5")
        await wait_for(pilot, lambda: app.query_one("#rows", RowList).lines)
        await pilot.press("t", "y")
        await wait_for(pilot, lambda: len(queues.asked) == 2)
        await wait_for(pilot, lambda: any("the request has expired" in line for line in screen(app)))
        await pilot.press("down", "t")
        assert len(app.screen_stack) == 1, "an entry that is not a job cannot be retried"
        assert queues.asked[1:] == [("retry", job_id("chat", 5))]


async def test_without_redis_the_last_reading_stays_and_the_error_is_shown(queues: FakeQueues) -> None:
    app = TopApp(queues, "host", NEVER_S)
    async with app.run_test(size=(80, 24)) as pilot:
        await started(app, pilot)
        queues.error = RedisConnectionError("refused")
        await pilot.press("3")
        await wait_for(pilot, lambda: "Redis does not answer: refused" in screen(app)[0])
        assert any(line.startswith("chat") for line in screen(app))
        await pilot.press("ctrl+c")
    assert app.return_code == 130
