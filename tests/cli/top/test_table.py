"""The tables of `llamaq top`: order, filter, layout and the text of the cells, on plain data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.cells import cell_len
from tests.support.top_readings import NOW_MS, make_queue, make_reading, make_worker, totals

from llamaq.cli.top.formats import elide, format_bytes, format_ms, format_number, format_rate
from llamaq.cli.top.header_texts import pages_text, server_name, status_text
from llamaq.cli.top.line_types import Overview
from llamaq.cli.top.rates import RateTracker
from llamaq.cli.top.summarize_reading import summarize
from llamaq.cli.top.table import Order, Table, layout, row_text, select
from llamaq.cli.top.table_columns import PAGES, QUEUES, WORKERS


@pytest.fixture
def overview() -> Overview:
    """Three workers of two queues. `w2` is the fastest, and the rate of `w3` is not known."""
    tracker = RateTracker()
    before = [make_worker("w1"), make_worker("w2")]
    after = [
        make_worker("w1", heartbeat_ms=NOW_MS + 1000, totals=totals(5, 0, 0)),
        make_worker("w2", heartbeat_ms=NOW_MS + 1000, totals=totals(50, 0, 0)),
    ]
    new = make_worker("w3", queue="bulk")
    tracker.update(before)
    tracker.update([*after, new])
    chat = make_queue(workers=tuple(after))
    return summarize(make_reading(chat, make_queue("bulk", workers=(new,))), tracker)


def test_lines_are_sorted_by_a_column_and_unknown_values_come_last(overview: Overview) -> None:
    def order(*, is_reversed: bool) -> list[str]:
        found = select(WORKERS, overview, queue=None, text="", order=Order("tok/s", is_reversed))
        return [WORKERS.key(line) for line in found]

    assert order(is_reversed=False) == ["w2", "w1", "w3"]
    assert order(is_reversed=True) == ["w1", "w2", "w3"]
    names = select(WORKERS, overview, queue=None, text="", order=Order("worker"))
    assert [WORKERS.key(line) for line in names] == ["w1", "w2", "w3"]
    everything = select(WORKERS, overview, queue=None, text="", order=Order(is_reversed=True))
    assert [WORKERS.key(line) for line in everything] == ["w3", "w2", "w1"]


def test_the_key_for_sorting_reaches_every_column_and_then_the_first_order_again() -> None:
    order, seen = Order(), []
    for _ in range(len(WORKERS.columns) + 1):
        order = order.next_of(WORKERS)
        seen.append(order.column)
    assert seen == [*(column.name for column in WORKERS.columns), None]


def test_lines_are_filtered_by_queue_and_by_text(overview: Overview) -> None:
    assert len(select(WORKERS, overview, queue="chat", text="", order=Order())) == 2
    assert [WORKERS.key(line) for line in select(WORKERS, overview, queue=None, text="W3", order=Order())] == ["w3"]
    assert len(select(WORKERS, overview, queue=None, text="DEMO.gguf", order=Order())) == 3
    assert select(WORKERS, overview, queue="chat", text="w3", order=Order()) == []


@pytest.mark.parametrize("table", [QUEUES, *PAGES], ids=lambda table: table.title)
def test_every_table_fits_80_columns_and_a_wide_terminal_gets_all_columns(table: Table) -> None:
    for width in (80, 200):
        columns = layout(table.columns, width)
        assert len(row_text(columns, None)) == width
    assert len(columns) == len(table.columns)
    assert layout(table.columns, 1)[0][1] >= 1


def test_the_sum_of_all_queues_is_shown_only_for_several_queues(overview: Overview) -> None:
    assert [line.queue for line in QUEUES.lines(overview)] == ["(all)", "chat", "bulk"]
    single = summarize(make_reading(make_queue()), RateTracker())
    assert [line.queue for line in QUEUES.lines(single)] == ["chat"]


def test_a_long_text_loses_its_middle() -> None:
    assert elide("default.0.5f0c", 14) == "default.0.5f0c"
    assert elide("llamaq-worker-7d9f8b6c5-abcde", 13) == "llam…c5-abcde"
    for width in range(8):
        assert cell_len(elide("abcdefghijk", width)) <= width
        assert cell_len(elide("日本語のテキスト", width)) <= width


def test_numbers_have_few_characters() -> None:
    assert [format_rate(value) for value in (None, 0.0, 0.046, 0.999, 1.0, 9.96, 99_949.0, 123_456.0)] == [
        "-", "0", "0.05", "1.0", "1.0", "10", "99949", "123k",
    ]  # fmt: skip
    assert [format_number(value) for value in (0, 99_999, 123_456, 10**8, 10**11)] == [
        "0",
        "99999",
        "123k",
        "100M",
        "100G",
    ]
    assert [format_ms(value) for value in (0.44, 99.9, 830.0, 120_000.0)] == ["0.4", "99.9", "830", "2m"]
    assert [format_bytes(value) for value in (0, 2**26, 3 * 2**29, 2**40)] == ["0", "64M", "1.5G", "1.0T"]


def test_the_lines_above_the_tables_name_what_is_shown(overview: Overview) -> None:
    assert status_text("host:1", overview, "") == "host:1 · 0 waiting · 0 running · 3 workers · 0/12 slots · 55 tok/s"
    assert status_text("host:1", replace(overview, redis_fullness=0.89), "").endswith("tok/s")
    assert status_text("host:1", replace(overview, redis_fullness=0.93), "").endswith(" · Redis is 93% full")
    assert status_text("host:1", None, "") == "host:1: reading"
    assert status_text("host:1", overview, "Redis does not answer") == "Redis does not answer"
    empty = summarize(make_reading(), RateTracker())
    assert "no queue has a job or a worker" in status_text("host:1", empty, "")
    text = pages_text(WORKERS, "1-3 of 9", Order("tok/s", is_reversed=True), "\\[w]")
    assert text.plain.endswith("  1-3 of 9  by tok/s reversed  /\\[w]")


def test_the_name_of_the_server_has_neither_password_nor_options() -> None:
    assert server_name("redis://:secret@host:6379/0") == "host:6379/0"
    assert server_name("redis+sentinel://u:p%40w@a,b/name?sentinel_password=x") == "redis+sentinel://a,b/name"
