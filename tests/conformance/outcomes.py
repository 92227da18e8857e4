"""The outcomes of llama.cpp's tests, and which of them are expected to fail for which reason."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

WIDTH = 180
"""Columns of the tables, also where the output is no terminal: ids of tests are long."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one test."""

    test: str
    """Its id, such as `test_basic.py::test_no_ui`."""
    outcome: str
    """`passed`, `failed` or `skipped`."""
    reason: str
    seconds: float = 0.0
    token_counts: tuple[int, ...] = ()
    """The numbers of prompt tokens that the test has compared with those that it expects."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Tests that pass against llama-server, and are expected to fail against `llamaq serve`."""

    reason: str
    tests: tuple[str, ...]
    """Ids of tests, or patterns of them: `*` stands for any text."""
    may_pass: bool = False
    """Whether the tests may also pass: that depends on random texts, or on the load of the machine."""
    is_internal: bool = False
    """Whether the tests are about parts of llama-server that have no counterpart in `llamaq serve`."""

    def names(self, test: str) -> bool:
        """Return whether a test is one of these."""
        return any(
            fnmatchcase(test, pattern.replace("[*]", "\0").replace("[", "[[]").replace("\0", "[*]"))
            for pattern in self.tests
        )


def read_outcomes(path: Path) -> list[Outcome]:
    """Return the last outcome of each test: a test that passes may fail in its teardown."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return list(
        {line["test"]: Outcome(**{**line, "token_counts": tuple(line["token_counts"])}) for line in lines}.values()
    )


def read_left_out(path: Path) -> list[LeftOut]:
    """Return the groups of tests that are expected to fail."""
    groups = tomllib.loads(path.read_text())["group"]
    return [LeftOut(**{**group, "tests": tuple(group["tests"])}) for group in groups]


def read_not_run(path: Path) -> list[str]:
    """Return the files of tests that are not run."""
    return [file for group in tomllib.loads(path.read_text())["not_run"] for file in group["files"]]


def compare(
    outcomes: Sequence[Outcome], left_out: Sequence[LeftOut], expected: Collection[str], *, is_whole: bool
) -> Mapping[str, str]:
    """Return what is wrong, by the id of the test: a test fails without a reason, or passes in spite of one.

    Args:
        outcomes: The outcomes.
        left_out: The tests that are expected to fail.
        expected: The tests that pass against llama-server. The others may fail.
        is_whole: Whether all tests ran. Then a pattern must name at least one of them.
    """
    wrong: dict[str, str] = {}
    for each in outcomes:
        groups = [group for group in left_out if group.names(each.test)]
        if each.outcome == "failed" and each.test in expected and not groups:
            wrong[each.test] = f"passes against llama-server, and fails here: {each.reason}"
        if each.outcome == "passed" and groups and not any(group.may_pass for group in groups):
            wrong[each.test] = "passes, although left_out.toml names it"
    if is_whole:
        for group in left_out:
            for pattern in group.tests:
                if not any(LeftOut("", (pattern,)).names(test) for test in expected):
                    wrong[pattern] = "left_out.toml names it, and no such test passes against llama-server"
    return wrong


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print the numbers of each file of tests."""
    table = Table("tests", "passed", "failed", "skipped", "seconds")
    files = sorted({each.test.partition("::")[0] for each in outcomes})
    for file in [*files, ""]:
        own = [each for each in outcomes if each.test.startswith(file)]
        counts = Counter(each.outcome for each in own)
        numbers = [str(counts[name]) for name in ("passed", "failed", "skipped")]
        table.add_row(file or "all", *numbers, f"{sum(each.seconds for each in own):.0f}")
    _console().print(table)


def print_comparison(
    outcomes: Sequence[Outcome], left_out: Sequence[LeftOut], expected: Collection[str], wrong: Mapping[str, str]
) -> None:
    """Print how many of the tests that pass against llama-server pass here, why others fail, and what is wrong."""
    console = _console()
    internal = [group for group in left_out if group.is_internal]
    compared = [
        each for each in outcomes if each.test in expected and not any(group.names(each.test) for group in internal)
    ]
    failed = [each for each in compared if each.outcome != "passed"]
    table = Table(Column("test", overflow="fold"), "llama-server", "llamaq serve", "reason", show_lines=True)
    for each in failed:
        reasons = [group.reason for group in left_out if group.names(each.test)]
        table.add_row(each.test, "passed", each.outcome, *reasons[:1])
    if failed:
        console.print(table)
    console.print(
        f"With the same models, {len(compared)} of these tests pass against llama-server and are not about its "
        "internals. "
        f"{len(compared) - len(failed)} of those pass against llamaq serve"
        + (f" ({1 - len(failed) / len(compared):.1%})." if compared else ".")
    )
    also = sum(each.outcome == "passed" and each.test not in expected for each in outcomes)
    console.print(f"{also} tests pass against llamaq serve alone.")
    for test, reason in wrong.items():
        console.print(f"{test}: {reason}")


def _console() -> Console:
    return Console(width=WIDTH, soft_wrap=True, markup=False, highlight=False)
