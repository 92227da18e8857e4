"""A plugin for the pytest process that runs llama.cpp's tests. It changes what only works with llama.cpp's own models.

- `match_regex` accepts every text, because the expressions contain words of another model.
- The numbers of prompt tokens in parameters belong to the vocabulary of that model. In a run against llama-server, the
  numbers that it returns are noted. In a run against `llamaq serve`, these numbers are expected:
  `LLAMAQ_CONFORMANCE_COUNTS` names a file with them, by the id of the test.
- The names of headers are compared without their case, as HTTP demands.
- The presets are not downloaded before the tests.
- Each outcome is written as one line of JSON to the file that `LLAMAQ_CONFORMANCE_OUTCOMES` names.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any, Self

import pytest
import requests

MAX_REASON_CHARS = 200
TOKEN_COUNTS = ("n_prompt", "n_tokens")
"""Parameters of tests that are numbers of prompt tokens."""
SEEN_COUNTS = "token_counts"
"""The property of a test that has the numbers it has compared."""


class TokenCount(int):
    """A number of prompt tokens that a test expects.

    Args:
        seen: Gets the numbers that the test compares with this one.
        expected: The numbers of llama-server. None: every number is right.
    """

    def __new__(cls, seen: list[int], expected: list[int] | None) -> Self:
        number = super().__new__(cls, expected[0] if expected else 0)
        number.seen, number.expected = seen, expected
        return number

    seen: list[int]
    expected: list[int] | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int):
            return False
        self.seen.append(int(other))
        return self.expected is None or other in self.expected

    def __hash__(self) -> int:
        return super().__hash__()


def pytest_configure() -> None:
    utils: Any = importlib.import_module("utils")
    utils.match_regex = lambda *_: True
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    make_request = utils.ServerProcess.make_request

    def make_request_with_http_headers(*args: Any, **kwargs: Any) -> Any:
        response = make_request(*args, **kwargs)
        response.headers = requests.structures.CaseInsensitiveDict(response.headers)
        return response

    utils.ServerProcess.make_request = make_request_with_http_headers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    counts = os.environ.get("LLAMAQ_CONFORMANCE_COUNTS")
    expected: dict[str, list[int]] = json.loads(Path(counts).read_text()) if counts else {}
    for item in items:
        seen: list[int] = []
        item.user_properties.append((SEEN_COUNTS, seen))
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        for name in TOKEN_COUNTS:
            if name in params:
                params[name] = TokenCount(seen, expected.get(_test_id(item.nodeid)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A test has several reports: its setup, its call and its teardown.
    if report.when != "call" and report.passed:
        return
    reason = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
    elif report.failed:
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or report.longreprtext[-500:]
    line = {
        "test": _test_id(report.nodeid),
        "outcome": report.outcome,
        "seconds": round(report.duration, 2),
        "reason": " ".join(reason.split())[:MAX_REASON_CHARS],
        "token_counts": dict(report.user_properties).get(SEEN_COUNTS, []),
    }
    with Path(os.environ["LLAMAQ_CONFORMANCE_OUTCOMES"]).open("a") as outcomes:
        print(json.dumps(line), file=outcomes)


def _test_id(node_id: str) -> str:
    return node_id.removeprefix("unit/")
