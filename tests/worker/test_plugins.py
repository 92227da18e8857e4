"""Users' objects are loaded by name, as `module:attribute`."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamaq.common.errors import InvalidSettings
from llamaq.worker.plugins import load_hooks, load_object

SOURCE = """
answer = 42
def on_measurement(name, measurements):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of a module in the working directory, which is not on `sys.path`."""
    name = f"user_{secrets.token_hex(4)}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def test_a_module_in_the_working_directory_is_found(module: str) -> None:
    assert load_object(f"{module}:answer", "hooks") == 42


def test_the_working_directory_is_added_once(module: str, tmp_path: Path) -> None:
    load_object(f"{module}:answer", "hooks")
    load_object(f"{module}:answer", "hooks")
    assert sys.path.count(str(tmp_path)) == 1


@pytest.mark.parametrize("spec", ["", "module", "module:", ":attribute"])
def test_a_name_of_another_form_is_refused(spec: str) -> None:
    with pytest.raises(InvalidSettings, match=r"--hooks \(LLAMAQ_HOOKS\): .* is not of the form module:attribute"):
        load_object(spec, "hooks")


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("no_such_module:x", "ModuleNotFoundError"),
        ("json:no_such_attribute", "AttributeError"),
        ("..relative:x", "TypeError"),
    ],
)
def test_the_message_for_an_object_that_cannot_be_loaded_names_the_error(spec: str, error: str) -> None:
    with pytest.raises(InvalidSettings, match=rf"--batch-strategy \(LLAMAQ_BATCH_STRATEGY\): .*{error}"):
        load_object(spec, "batch_strategy")


def test_the_message_for_a_module_that_fails_to_import_names_the_error(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("1 / 0")
    with pytest.raises(InvalidSettings, match="ZeroDivisionError"):
        load_object(f"{module}:answer", "hooks")


def test_hooks_are_loaded_in_order_and_must_be_callable(module: str) -> None:
    (hook,) = load_hooks((f"{module}:on_measurement",))
    assert hook.__name__ == "on_measurement"
    assert load_hooks(()) == []
    with pytest.raises(InvalidSettings, match=rf"--hooks \(LLAMAQ_HOOKS\): '{module}:answer' is not callable"):
        load_hooks((f"{module}:on_measurement", f"{module}:answer"))
