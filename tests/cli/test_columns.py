"""Rows are printed as columns of plain text, and as blocks in a narrow terminal. No cell is cut."""

from __future__ import annotations

import sys

import pytest

from llamaq.cli.columns import format_blocks, format_rows, show_fields, show_rows
from llamaq.cli.error_report import explain
from llamaq.cli.top.formats import elide
from llamaq.common.errors import WorkerEnded

NAMES = ("worker", "slots", "model")
ROWS = [("host-1234-abcdef", "1/4", "a model with a long name.gguf"), ("h-1-2", "0/16", "b")]
COLUMNS = [
    "worker            slots  model",
    "host-1234-abcdef  1/4    a model with a long name.gguf",
    "h-1-2             0/16   b",
]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert format_rows(NAMES, ROWS, None) == COLUMNS
    assert format_rows(NAMES, ROWS, 80) == COLUMNS


def test_only_the_last_column_may_be_wider_than_the_terminal() -> None:
    first_columns = len("host-1234-abcdef  slots")
    assert format_rows(NAMES, ROWS, first_columns) == COLUMNS
    assert format_rows(NAMES, ROWS, first_columns - 1) == [
        "worker  host-1234-abcdef",
        "slots   1/4",
        "model   a model with a long name.gguf",
        "",
        "worker  h-1-2",
        "slots   0/16",
        "model   b",
    ]


def test_a_closed_standard_output_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    show_rows(NAMES, ROWS, missing="no worker")


def test_a_character_may_be_two_cells_wide() -> None:
    assert format_rows(("name", "n"), [("模型", "1"), ("abcd", "2")], None) == ["name  n", "模型  1", "abcd  2"]
    assert format_blocks(("name", "n"), [("模型", "1")]) == ["name  模型", "n     1"]


CONTROLLING = "\x1b]0;title\x07\x1b[2J\x9b31m\x7f"
SHOWN = r"\x1b]0;title\x07\x1b[2J\x9b31m\x7f"


@pytest.mark.parametrize("width", [None, 80, 10])
def test_the_texts_of_other_clients_cannot_control_the_terminal(width: int | None) -> None:
    rows = format_rows(("id", "reason"), [(CONTROLLING, f"{CONTROLLING}\nforged line")], width)
    assert all(row.isprintable() for row in rows)
    assert SHOWN in "".join(rows)
    assert r"\x0aforged line" in rows[-1]


def test_the_fields_of_other_clients_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_fields([("reason", CONTROLLING), ("text", "two\nlines")])
    assert capsys.readouterr().out == f"reason  {SHOWN}\ntext    two\nlines\n"


def test_the_error_and_the_live_view_cannot_control_the_terminal() -> None:
    assert explain(WorkerEnded(f"worker {CONTROLLING} ended")) == f"worker {SHOWN} ended"
    assert elide(CONTROLLING, 80) == SHOWN
