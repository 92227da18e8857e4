"""A plugin for the pytest process that runs llama.cpp's tests. It changes what only works with llama.cpp's own models.

- `match_regex` accepts every text, because the expressions contain words of another model.
- The numbers of prompt tokens in parameters equal every number, because they belong to the vocabulary of that model.
- The names of headers are compared without their case, as HTTP demands.
- The presets are not downloaded before the tests.
- Each outcome is written as one line of JSON to the file that `LLAMAQ_CONFORMANCE_OUTCOMES` names.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import requests

MAX_REASON_CHARS = 200
TOKEN_COUNTS = ("n_prompt", "n_tokens")
"""Parameters of tests that are numbers of prompt tokens."""


class AnyNumber(int):
    """Equals every number."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

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
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        for name in TOKEN_COUNTS:
            if name in params:
                params[name] = AnyNumber(str(params[name]))


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
        "test": report.nodeid.removeprefix("unit/"),
        "outcome": report.outcome,
        "seconds": round(report.duration, 2),
        "reason": " ".join(reason.split())[:MAX_REASON_CHARS],
    }
    with Path(os.environ["LLAMAQ_CONFORMANCE_OUTCOMES"]).open("a") as outcomes:
        print(json.dumps(line), file=outcomes)
