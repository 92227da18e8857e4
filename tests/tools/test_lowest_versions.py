"""The requirements of `make test-lowest` follow from the lower bounds in the three pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from llamaq.tools.lowest_versions import LEFT_OUT, UnclearBound, lowest_requirements


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with three distributions."""
    write(tmp_path / "worker", "one-worker", ['"one==1"', '"numpy>=1.26,<3"'])
    write(tmp_path / "producer", "one-serve", ['"one==1"'])
    write(tmp_path, "one", ['"redis[hiredis]>=6.4"'], 'worker = ["one-worker==1"]', 'top = ["Text.ual>=3.1"]')
    return tmp_path


def write(folder: Path, name: str, dependencies: list[str], *extras: str) -> None:
    folder.mkdir(exist_ok=True)
    lines = ["[project]", f'name = "{name}"', f"dependencies = [{', '.join(dependencies)}]"]
    (folder / "pyproject.toml").write_text("\n".join([*lines, "[project.optional-dependencies]", *extras]))


def test_each_dependency_of_users_has_the_version_of_its_lower_bound(root: Path) -> None:
    assert lowest_requirements(root) == ["numpy==1.26", "redis[hiredis]==6.4", "text-ual==3.1"]


def test_other_packages_of_the_development_keep_their_ranges(root: Path) -> None:
    development = ["redis[ocsp]>=6.4", "pytest>=8,<10", *(f"{name}>=1" for name in LEFT_OUT)]
    write(root, "one", ['"redis>=6.4"'], f"dev = {development}", 'tools = ["torch>=2"]')
    assert lowest_requirements(root) == ["numpy==1.26", "redis==6.4", "pytest<10,>=8"]


@pytest.mark.parametrize("text", ["redis", "redis<7", "redis==6.4", "redis>=6,>=7"])
def test_a_dependency_without_one_lower_bound_is_an_error(root: Path, text: str) -> None:
    write(root, "one", [f'"{text}"'])
    with pytest.raises(UnclearBound, match=r"^redis.*needs one lower bound"):
        lowest_requirements(root)


@pytest.mark.parametrize("extra", ["rq", "dev", "tools"])
def test_two_lower_bounds_of_one_package_are_an_error(root: Path, extra: str) -> None:
    write(root, "one", ['"Redis>=6.4"'], f'{extra} = ["redis>=7"]')
    with pytest.raises(UnclearBound, match=r"two lower bounds: 6\.4 and 7"):
        lowest_requirements(root)


def test_the_bounds_of_this_checkout_are_clear() -> None:
    found = [Requirement(text) for text in lowest_requirements()]
    names = [each.name for each in found]
    assert len(names) == len(set(names))
    pinned = {each.name for each in found if str(each.specifier).startswith("==")}
    assert {"redis", "numpy", "llama-cpp-python", "rq", "uvicorn"} <= pinned
    assert {"pytest", "fakeredis"} <= set(names) - pinned
    assert not {"llamaq", "llamaq-worker", "llamaq-serve", "torch"} & set(names)
