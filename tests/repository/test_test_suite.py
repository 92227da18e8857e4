"""The split of the test suite: quick tests start no process, and tests that share a worker form one group."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from tests.support.distribution import check_groups, distribute, group_of
from tests.support.lazy_import import lazy_import
from tests.support.quick import NotQuick, guard_quick_test, is_quick

ROOT = Path(__file__).resolve().parents[2]


class CollectedTest:
    """A stand-in for a collected test, with the attributes that the rules read."""

    def __init__(self, nodeid: str, *fixtures: str, marks: tuple[str, ...] = ()) -> None:
        self.nodeid = nodeid
        self.fixturenames = fixtures
        self.markers = list(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.markers.append(mark.args[0])


def collected(*tests: CollectedTest) -> Any:
    return list(tests)


def test_the_quick_tests_are_those_without_server_model_and_process(request: pytest.FixtureRequest) -> None:
    """Check the collected tests: all, with `make test`."""
    tests = request.session.items
    quick = [test.nodeid for test in tests if test.get_closest_marker("quick")]
    starting = ("tests/e2e/", "tests/lifecycle/", "tests/repository/")
    assert not [name for name in quick if name.startswith(starting) or "redis-server" in name]
    if {test.path for test in tests} >= set((ROOT / "tests").rglob("test_*.py")):
        assert len(quick) > 600
        assert [name for name in quick if "[fakeredis]" in name]


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        (CollectedTest("tests/worker/core/test_a.py::test_b", "tmp_path"), True),
        (CollectedTest("tests/worker/core/test_a.py::test_b", "redis_url", "redis_server"), False),
        (CollectedTest("tests/worker/core/test_a.py::test_b", "vocab", "demo_model"), False),
        (CollectedTest("tests/worker/core/test_a.py::test_b", marks=("starts_processes",)), False),
        (CollectedTest("tests/lifecycle/test_a.py::test_b"), False),
    ],
)
def test_a_test_is_not_quick_because_of_its_folder_fixture_or_mark(test: Any, expected: bool) -> None:
    assert is_quick(test) is expected


def test_a_quick_test_can_neither_start_a_process_nor_load_a_model(demo_model: Path) -> None:
    with guard_quick_test("test_name"):
        with pytest.raises(NotQuick, match="test_name starts a process"):
            subprocess.run(["true"], check=True)
        with pytest.raises(NotQuick, match="test_name loads a model"):
            llama_cpp.llama_model_load_from_file(str(demo_model).encode(), llama_cpp.llama_model_default_params())
    subprocess.run(["true"], check=True)


def test_tests_of_one_queue_or_file_form_a_group_and_tests_that_share_nothing_do_not() -> None:
    served = collected(
        CollectedTest("tests/e2e/test_a.py::test_1", "client", "demo"),
        CollectedTest("tests/e2e/test_b.py::test_1", "demo"),
        CollectedTest("tests/e2e/test_b.py::test_2", "slow", "demo"),
    )
    assert [group_of(test) for test in served] == ["queue-demo", "queue-demo", "queue-slow"]
    pure, alone = collected(
        CollectedTest("tests/worker/test_a.py::test_1"), CollectedTest("tests/lifecycle/test_a.py::test_1")
    )
    assert group_of(pure) == "tests/worker/test_a.py"
    assert group_of(alone) is None


def test_long_groups_start_first_and_quick_tests_last() -> None:
    tests = collected(
        CollectedTest("tests/worker/test_a.py::test_1"),
        CollectedTest("tests/lifecycle/test_a.py::test_1"),
        CollectedTest("tests/e2e/test_a.py::test_1", "demo"),
    )
    distribute(tests)
    assert [test.nodeid.split("/")[1] for test in tests] == ["e2e", "lifecycle", "worker"]
    assert [test.markers for test in tests] == [["queue-demo"], [], ["tests/worker/test_a.py"]]


def test_groups_that_xdist_ignores_are_an_error(request: pytest.FixtureRequest) -> None:
    test = pytest.Function.from_parent(request.node.parent, name="test_name", callobj=lambda: None)
    check_groups([test])  # it has no group
    test.add_marker(pytest.mark.xdist_group("queue-demo"))
    with pytest.raises(pytest.UsageError, match="ignores the groups of the tests"):
        check_groups([test])


def test_a_lazily_imported_package_is_loaded_when_it_is_used_but_not_when_pytest_collects_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_lazily.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(tmp_path)
    package = lazy_import("imported_lazily")
    assert not inspect.isclass(package)  # reads `__class__`
    assert not hasattr(package, "__test__")
    assert "imported_lazily" not in sys.modules
    assert package.answer == 42
    monkeypatch.delitem(sys.modules, "imported_lazily")
