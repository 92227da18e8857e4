"""Rows are printed as columns of plain text, and as blocks in a narrow terminal. No cell is cut."""

from __future__ import annotations

import sys

import pytest

from llamaq.cli.columns import format_blocks, format_rows, show_rows

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
