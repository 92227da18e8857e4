"""Groups the tests for pytest-xdist: the tests of a group run in one xdist worker, and long groups start first.

`make test` runs `pytest -n N --dist loadgroup --no-loadscope-reorder`: each group runs in one xdist worker, and groups
start in the order in which the tests were collected. Without xdist, tests are neither grouped nor sorted.
"""

from __future__ import annotations

import pytest

SERVED_QUEUES = ("slow", "narrow", "demo")
"""Fixtures of `tests/e2e`, each of which starts a worker. The tests of each fixture form a group, so that its
worker is started once, and no test finds the jobs of another test in its queue."""

SEPARATE = ("tests/lifecycle/", "tests/repository/test_bench.py", "tests/worker_cli/test_start_worker_commands.py")
"""Folders and files whose tests share no process: each of these tests may run in any xdist worker."""

LONG_GROUPS = ("tests/tools/test_demo_model.py", "tests/repository/test_packaging.py", "queue-")
"""Prefixes of the names of the longest groups. These groups start first, so that all xdist workers end at about the
same time."""


MEDIUM_GROUPS = (
    *("tests/e2e/", "tests/cli/", "tests/worker/generation/", "tests/worker/scheduling/", "tests/worker/engine/"),
    *("tests/producer/rq/", "tests/producer/streaming/", "tests/common/", "tests/repository/", "tests/gateway/"),
)
"""Prefixes of the names of groups that take seconds. They start before all others, none of which can delay the end."""


def group_of(item: pytest.Item) -> str | None:
    """Return the name of the group of a test, or None if the test needs no group.

    Tests that share a worker process or a module fixture form a group. The other tests of a file form a group too, so
    that an xdist worker requests new work once per file instead of once per test.
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
    """Whether the test uses a fixture of module scope."""
    info = getattr(item, "_fixtureinfo", None)
    definitions = info.name2fixturedefs if info is not None else {}
    return any(each[-1].scope == "module" for each in definitions.values())


def start_rank(item: pytest.Item) -> int:
    """Return the sort key of a test: long groups first, then tests that start processes, then the other groups."""
    group = group_of(item)
    if group is None:
        return 1
    if group.startswith(LONG_GROUPS):
        return 0
    return 2 if group.startswith(MEDIUM_GROUPS) else 3


def distribute(items: list[pytest.Item]) -> None:
    """Mark each test with its group, and sort the tests by `start_rank`."""
    items.sort(key=start_rank)
    for item in items:
        if (group := group_of(item)) is not None:
            item.add_marker(pytest.mark.xdist_group(group))


def check_groups(items: list[pytest.Item]) -> None:
    """Check that pytest-xdist has read the groups: it appends the name of a test's group to the test's node id.

    Without groups, each xdist worker starts the workers of all shared fixtures. The tests then take three times as
    long, and nothing says why.

    Raises:
        pytest.UsageError: The node id of a test does not name its group.
    """
    for item in items:
        marker = item.get_closest_marker("xdist_group")
        if marker is not None and not item.nodeid.endswith(f"@{marker.args[0]}"):
            raise pytest.UsageError(
                f"pytest-xdist ignores the groups of the tests: the node id is {item.nodeid!r}. pytest "
                f"{pytest.__version__} and pytest-xdist do not fit together; `make venv` installs versions that do"
            )
