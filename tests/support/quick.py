"""Defines the quick tests, which start no process and load no model. `make test-quick` runs only these.

A test is quick unless its folder, one of its fixtures or one of the marks `starts_processes` and `slow` excludes it,
so a new test of pure logic needs no mark. A quick test that starts a process or loads a model fails, also in
`make test`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest

STARTING_FOLDERS = (
    *("tests/e2e/", "tests/lifecycle/", "tests/repository/", "tests/tools/"),
    *("tests/worker_cli/test_start_worker_commands.py", "tests/worker/local/"),
    *("tests/common/vocab/test_llama_vocab.py", "tests/common/vocab/test_text_tokenizer.py"),
    *("tests/common/vocab/test_chat_tokenizer.py", "tests/common/vocab/test_special_token_masking.py"),
    *("tests/worker/engine/", "tests/worker/kv_cache/test_cache_on_llama.py"),
    *("tests/worker/slot_files/test_slots_on_llama.py", "tests/worker/scheduling/test_faulty_job_on_llama.py"),
)
EXCLUDING_MARKS = ("starts_processes", "slow")
STARTING_FIXTURES = frozenset({
    "redis_server", "demo_model", "bert_model", "rerank_model", "chat_model", "tag_model", "any_model",
    "expert_model", "gap_model",
})  # fmt: skip
"""Fixtures that start a Redis or return a model file for llama.cpp."""
STARTING_EVENTS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system"})
"""Audit events that the interpreter raises when it starts a process: https://docs.python.org/3/library/audit_events.html"""

_quick_test: str | None = None


class NotQuick(Exception):
    """Raised when a quick test starts a process or loads a model."""


def is_quick(item: pytest.Item) -> bool:
    """Return whether a test is quick, according to its folder, its mark and its fixtures."""
    if item.nodeid.startswith(STARTING_FOLDERS) or any(map(item.get_closest_marker, EXCLUDING_MARKS)):
        return False
    return STARTING_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())) and not starts_redis(item)


def has_quick_tests(path: Path, root: Path) -> bool:
    """Return whether a file of tests may have quick ones, so that it must be imported for `make test-quick`."""
    return not path.relative_to(root).as_posix().startswith(STARTING_FOLDERS)


def starts_redis(item: pytest.Item) -> bool:
    """Return whether the parameters of a test select the real server of `fake_redis.url_of_each_server`."""
    spec = getattr(item, "callspec", None)
    return spec is not None and spec.params.get("redis_url") == "redis-server"


def _refuse_process(event: str, _: object) -> None:
    if _quick_test is not None and event in STARTING_EVENTS:
        raise NotQuick(f"{_quick_test} starts a process ({event}): it needs the mark `starts_processes`")


def install_audit_hook() -> None:
    """Install the hook that refuses new processes in quick tests. Python cannot remove an audit hook."""
    sys.addaudithook(_refuse_process)


@contextmanager
def guard_quick_test(test: str) -> Iterator[None]:
    """Within this context, raise `NotQuick` with the name of the test if it starts a process or loads a model."""
    global _quick_test  # noqa: PLW0603  # an audit hook has no argument for state

    def refuse_model(*_: object) -> NoReturn:
        raise NotQuick(f"{test} loads a model: it needs a fixture of STARTING_FIXTURES")

    _quick_test = test
    try:
        if "llama_cpp" not in sys.modules:
            yield
            return
        with patch("llama_cpp.llama_model_load_from_file", refuse_model):
            yield
    finally:
        _quick_test = None
