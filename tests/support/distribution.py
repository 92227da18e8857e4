"""Which tests run in the same pytest-xdist worker, and which of them start first.

`make test` runs `pytest -n N --dist loadgroup --no-loadscope-reorder`: a group of tests goes to one xdist worker, as a
whole, and groups start in the order in which the tests were collected. Without xdist nothing here changes anything.
"""

from __future__ import annotations

import pytest

SERVED_QUEUES = ("slow", "narrow", "demo")
"""Session fixtures of `tests/e2e`, each of which starts a worker. Their tests form one group for each, so that every
worker is started once, and no test finds the jobs of another one in its queue."""

SEPARATE = ("tests/lifecycle/", "tests/repository/test_bench.py", "tests/cli/test_gpu_host_commands.py")
"""Folders and files whose tests start their own processes and share nothing: each may run in any xdist worker."""

LONG_GROUPS = ("tests/tools/test_demo_model.py", "tests/repository/test_packaging.py", "queue-")
"""The groups that take longest, by the beginning of their name. They start first, so that all xdist workers end at
about the same time."""


def group_of(item: pytest.Item) -> str | None:
    """Return the name of the group of a test; None for a test that is a group by itself.

    Tests that share a fixture of a module or a worker process stay together. Of the others, those of one file do: an
    xdist worker then asks for work once for each file, not once for each of 1,800 tests.
    """
    fixtures = getattr(item, "fixturenames", ())
    queue = next((name for name in SERVED_QUEUES if name in fixtures), None)
    path = item.nodeid.partition("::")[0]
    if queue is not None and path.startswith("tests/e2e/"):
        return f"queue-{queue}"
    if path.startswith(SEPARATE) and not has_module_fixture(item):
        return None
    return path


def has_module_fixture(item: pytest.Item) -> bool:
    """Whether the test uses a fixture that its file creates once for several tests."""
    info = getattr(item, "_fixtureinfo", None)
    definitions = info.name2fixturedefs if info is not None else {}
    return any(each[-1].scope == "module" for each in definitions.values())


def place_of(item: pytest.Item) -> int:
    """Return the sort key of a test: long groups come first, then tests that start processes, then all others."""
    group = group_of(item)
    if group is None:
        return 1
    return 0 if group.startswith(LONG_GROUPS) else 2


def distribute(items: list[pytest.Item]) -> None:
    """Mark each test with its group, and sort the tests by `place_of`."""
    items.sort(key=place_of)
    for item in items:
        if (group := group_of(item)) is not None:
            item.add_marker(pytest.mark.xdist_group(group))
