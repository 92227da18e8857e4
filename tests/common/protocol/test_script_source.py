"""Each script is loaded with the shared functions that it needs, and with no others."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from llamaq.common.protocol.script_source import SHARED, source

PACKAGES = ("llamaq.common.protocol", "llamaq.worker.broker")
SCRIPTS = sorted(
    (path.name.removesuffix(".lua"), package)
    for package in PACKAGES
    for path in (files(package) / "scripts").iterdir()
    if not path.name.startswith("_")
)


def defined_in(text: str) -> list[str]:
    """Return the names that the top level of a Lua file defines."""
    functions = re.findall(r"^local function (\w+)", text, re.MULTILINE)
    return [*functions, *re.findall(r"^local (\w+) =", text, re.MULTILINE)]


@pytest.mark.parametrize(("name", "package"), SCRIPTS)
def test_a_script_has_each_shared_function_that_it_names(name: str, package: str) -> None:
    folder = files("llamaq.common.protocol") / "scripts"
    parts = [folder / f"{part}.lua" for part in SHARED]
    if package == "llamaq.worker.broker":
        parts.append(files(package) / "scripts" / "_shared.lua")
    shared = [one for part in parts for one in defined_in(part.read_text())]
    text = source(name, package)
    code = re.sub(r"--.*", "", text)
    for one in shared:
        places = [found.start() for found in re.finditer(rf"\b{one}\b", code)]
        if places:
            definition = re.search(rf"^local (function )?{one}\b", code, re.MULTILINE)
            assert definition is not None, one
            assert definition.end() <= places[0] + len(one), f"{one} is used before its definition"


def test_scripts_do_without_the_functions_that_they_do_not_need() -> None:
    assert "local function terminate" in source("finish")
    assert "local function terminate" not in source("flush")
    assert "local function add_entry" not in source("read")
