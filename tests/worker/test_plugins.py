"""Objects of the user's own, named `module:attribute`."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamaq.common.errors import InvalidSettings
from llamaq.worker.plugins import load_hooks, load_object

OWN = """
answer = 42
def on_measurement(name, measurements):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the working directory, which is not on the path of modules."""
    name = f"own_{secrets.token_hex(4)}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def test_a_module_of_the_working_directory_is_found(module: str) -> None:
    assert load_object(f"{module}:answer", "hooks") == 42


def test_the_working_directory_comes_once(module: str, tmp_path: Path) -> None:
    load_object(f"{module}:answer", "hooks")
    load_object(f"{module}:answer", "hooks")
    assert sys.path.count(str(tmp_path)) == 1


@pytest.mark.parametrize("spec", ["", "module", "module:", ":attribute"])
def test_another_form_is_refused(spec: str) -> None:
    with pytest.raises(InvalidSettings, match=r"--hooks \(LLAMAQ_HOOKS\): .* is not of the form module:attribute"):
        load_object(spec, "hooks")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("no_such_module:x", "ModuleNotFoundError"),
        ("json:no_such_attribute", "AttributeError"),
        ("..relative:x", "TypeError"),
    ],
)
def test_what_cannot_be_loaded_is_said_with_its_reason(spec: str, why: str) -> None:
    with pytest.raises(InvalidSettings, match=rf"--batch-strategy \(LLAMAQ_BATCH_STRATEGY\): .*{why}"):
        load_object(spec, "batch_strategy")


def test_a_module_that_fails_to_import_is_said_with_its_reason(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("1 / 0")
    with pytest.raises(InvalidSettings, match="ZeroDivisionError"):
        load_object(f"{module}:answer", "hooks")


def test_hooks_are_loaded_in_order_and_must_be_callable(module: str) -> None:
    (hook,) = load_hooks((f"{module}:on_measurement",))
    assert hook.__name__ == "on_measurement"
    assert load_hooks(()) == []
    with pytest.raises(InvalidSettings, match=rf"--hooks \(LLAMAQ_HOOKS\): '{module}:answer' is not callable"):
        load_hooks((f"{module}:on_measurement", f"{module}:answer"))
