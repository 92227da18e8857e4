"""docs/architecture.md: its links lead to files, and it quotes the first docstring sentence of each package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = {
    path.parent.relative_to(ROOT)
    for portion in ("common", "producer", "worker")
    for path in (ROOT / portion / "llamaq").glob("*/**/__init__.py")
    if len(path.relative_to(ROOT).parts) > 4
}
"""Folders of the packages inside the portions, relative to the repository."""


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", PAGE))))
def test_every_link_of_the_page_leads_to_a_file_or_folder(target: str) -> None:
    assert (ROOT / "docs" / target).exists()


def test_the_page_quotes_the_sentence_of_every_package() -> None:
    rows = dict(re.findall(r"^\| \[`[a-z_/]+`\]\(\.\./([a-z_/]+)\) \| (.+) \|$", PAGE, re.MULTILINE))
    sentences = {}
    for package in PACKAGES - {Path("common/llamaq/common/protocol/scripts")}:
        docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
        assert docstring is not None, package
        sentences[str(package)] = docstring.splitlines()[0]
    assert rows == sentences


def test_every_arrow_between_the_packages_of_the_worker_is_an_import() -> None:
    picture = re.findall(r"```mermaid\nflowchart TD\n(.*?)```", PAGE, re.DOTALL)[1]
    arrows = re.findall(r"^\s+(\w+)(?:\[.*?\])? --> (\w+)", picture, re.MULTILINE)
    assert len(arrows) > 10
    graph = grimp.build_graph("llamaq.worker", "llamaq.common", cache_dir=None)
    for importer, imported in arrows:
        packages = {"importer": f"llamaq.worker.{importer}", "imported": f"llamaq.worker.{imported}"}
        assert graph.direct_import_exists(**packages, as_packages=True), packages
