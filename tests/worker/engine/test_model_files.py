"""A model is given as a path or as `hf:OWNER/REPO/FILE.gguf`. If no model is given, the demo model is used."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamaq.common.errors import MissingExtra, ModelError
from llamaq.worker.engine.model_files import demo_model_path, files_of_model, resolve_model_file


class HfHubHTTPError(OSError):
    """Error of huggingface_hub."""


class LocalEntryNotFoundError(FileNotFoundError):
    """Error of huggingface_hub."""


class Hub(ModuleType):
    """A fake huggingface_hub whose downloads return a path or raise an error."""

    def __init__(self, outcome: Path | Exception) -> None:
        super().__init__("huggingface_hub")
        self.downloads: list[tuple[str, str]] = []
        self._outcome = outcome

    def hf_hub_download(self, repo_id: str, filename: str) -> str:
        self.downloads.append((repo_id, filename))
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return str(self._outcome)


def install(monkeypatch: pytest.MonkeyPatch, outcome: Path | Exception) -> Hub:
    hub = Hub(outcome)
    errors: Any = ModuleType("huggingface_hub.errors")
    errors.HfHubHTTPError, errors.LocalEntryNotFoundError = HfHubHTTPError, LocalEntryNotFoundError
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return hub


def test_without_a_name_the_demo_model_is_used() -> None:
    assert resolve_model_file(None) == demo_model_path()
    assert demo_model_path().read_bytes()[:4] == b"GGUF"


def test_a_path_is_used_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    assert resolve_model_file(str(model)) == model
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_file("~/model.gguf") == model


@pytest.mark.parametrize("spec", ["no-such-file.gguf", ".", ""])
def test_a_path_without_a_file_is_an_error_that_names_the_flag(spec: str) -> None:
    with pytest.raises(ModelError, match="--model: there is no file"):
        resolve_model_file(spec)


@pytest.mark.parametrize("spec", ["x" * 5000, "~no-such-user/model.gguf"], ids=["length", "user"])
def test_a_path_that_the_system_cannot_look_up_is_a_model_error(spec: str) -> None:
    with pytest.raises(ModelError, match="--model: "):
        resolve_model_file(spec)


def test_a_model_in_a_folder_that_the_user_may_not_enter_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ModelError, match=r"--model-draft: 'private/model\.gguf' cannot be read: .*Permission denied"):
        resolve_model_file("private/model.gguf", "--model-draft")
    first = tmp_path / "model-00001-of-00002.gguf"
    assert files_of_model(first) == [first]


def refuse(path: Path) -> bool:
    """Raise the error of a folder that the user may not enter. Root may enter every folder."""
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@pytest.mark.parametrize("spec", ["hf:", "hf:owner/file.gguf", "hf:owner/repo/file.bin", "hf:owner/repo/../x y.gguf"])
def test_the_error_for_a_malformed_hub_name_shows_the_form(spec: str) -> None:
    with pytest.raises(ModelError, match=r"--model: .* is not of the form hf:OWNER/REPO/FILE\.gguf"):
        resolve_model_file(spec)


def test_without_huggingface_hub_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"pip install 'llamaq\[hub\]'"):
        resolve_model_file("hf:owner/repo/file.gguf")


def test_a_file_of_the_hub_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = install(monkeypatch, tmp_path / "cached.gguf")
    assert resolve_model_file("hf:own-er/re.po/folder/file-Q8_0.gguf") == tmp_path / "cached.gguf"
    assert hub.downloads == [("own-er/re.po", "folder/file-Q8_0.gguf")]


def test_all_files_of_a_split_model_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = install(monkeypatch, tmp_path / "cached.gguf")
    resolve_model_file("hf:owner/repo/q8/big-00001-of-00003.gguf")
    assert [name for _, name in hub.downloads] == [f"q8/big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (LocalEntryNotFoundError("cannot connect"), "is not in the local cache and the hub cannot be reached"),
        (HfHubHTTPError("404 Client Error"), "cannot be downloaded: 404 Client Error"),
        (OSError("no space left"), "cannot be downloaded: no space left"),
        (ValueError("a repo id must be …"), "cannot be downloaded: a repo id must be …"),
    ],
)
def test_an_error_of_the_hub_becomes_a_model_error(
    monkeypatch: pytest.MonkeyPatch, outcome: Exception, message: str
) -> None:
    install(monkeypatch, outcome)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model_file("hf:owner/repo/file.gguf")
    assert "hf:owner/repo/file.gguf" in str(caught.value)
