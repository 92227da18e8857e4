"""Prints the requirements of an environment with the oldest versions that llamaq supports, in the format of pip.

The lower bounds in the three pyproject.toml state these versions. The bounds of the extra `dev` are no promise to
users, so its other packages keep their ranges, and pip installs the newest versions that fit.
"""

from __future__ import annotations

import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
PROJECTS = (".", "worker", "producer")
"""The folders with the pyproject.toml of a distribution."""
LEFT_OUT = frozenset({
    "import-linter",  # requires rich 14.2
    "litellm",  # requires httpx 0.28
})  # fmt: skip
"""Packages of the extra `dev` that cannot be installed beside the oldest versions."""


class UnclearBound(Exception):
    """Raised when the lower bound of a dependency is missing, or differs between two places."""


def lowest_requirements(root: Path = ROOT) -> list[str]:
    """Return one requirement for each dependency of the distributions and of their extras except `tools`.

    Dependencies of users have the version of their lower bound. The other packages of the extra `dev` follow.

    Raises:
        UnclearBound: A dependency has no lower bound, or two different ones.
    """
    groups = read_dependencies(root)
    bounds = lower_bounds(each for group in groups.values() for each in group)
    development, _ = groups.pop("dev", []), groups.pop("tools", [])
    extras: dict[str, set[str]] = defaultdict(set)
    for group in groups.values():
        for each in group:
            extras[canonicalize_name(each.name)] |= each.extras
    pinned = [str(Requirement(f"{name}[{','.join(extras[name])}]=={bounds[name]}")) for name in extras]
    others = [str(each) for each in development if canonicalize_name(each.name) not in extras.keys() | LEFT_OUT]
    return sorted(pinned) + sorted(others)


def read_dependencies(root: Path) -> dict[str, list[Requirement]]:
    """Return the dependencies of the distributions by the name of their extra, and those without an extra under "".

    Dependencies of one of these distributions on another are left out.
    """
    projects = [tomllib.loads((root / folder / "pyproject.toml").read_text())["project"] for folder in PROJECTS]
    own = {project["name"] for project in projects}
    groups: dict[str, list[Requirement]] = defaultdict(list)
    for project in projects:
        for extra, texts in {"": project.get("dependencies", []), **project.get("optional-dependencies", {})}.items():
            groups[extra] += [each for each in map(Requirement, texts) if each.name not in own]
    return groups


def lower_bounds(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Return the version in the lower bound of each package, by the normalized name of the package.

    Raises:
        UnclearBound: A dependency has no lower bound, or two different ones.
    """
    bounds: dict[str, str] = {}
    for each in requirements:
        found = [one.version for one in each.specifier if one.operator == ">="]
        if len(found) != 1:
            raise UnclearBound(f"{each}: a dependency needs one lower bound, as in {each.name}>=1.0")
        noted = bounds.setdefault(canonicalize_name(each.name), found[0])
        if noted != found[0]:
            raise UnclearBound(f"{each.name} has two lower bounds: {noted} and {found[0]}")
    return bounds


def main() -> int:
    """Print the requirements and return the exit code."""
    try:
        print("\n".join(lowest_requirements()))
    except UnclearBound as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
