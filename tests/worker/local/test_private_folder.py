"""Private folders, and the removal of those that killed processes have left."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from llamaq.worker.local import private_folder
from llamaq.worker.local.private_folder import PREFIX, PrivateFolder
from llamaq.worker.offload.atomic_files import LOCK, lock_folder


@pytest.fixture(autouse=True)
def _folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def abandoned(name: str) -> Path:
    """Create the folder of a process that was killed."""
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}{name}"
    folder.mkdir()
    (folder / LOCK).touch()
    (folder / "appendonly.aof").write_text("prompts")
    return folder


def test_a_new_folder_removes_abandoned_ones_only(tmp_path: Path) -> None:
    first = PrivateFolder()
    left = abandoned("left")
    not_locked = abandoned("not-locked")
    (not_locked / LOCK).unlink()
    linked = tmp_path / f"{PREFIX}linked"
    target = tmp_path / "target"
    abandoned("target").rename(target)
    linked.symlink_to(target)
    second = PrivateFolder()
    assert not left.exists()
    assert {first.path, second.path, not_locked, linked, target} == set(tmp_path.iterdir())
    assert (target / "appendonly.aof").exists()
    assert repr(first) == f"<PrivateFolder {first.path}>"
    for folder in (first, second, first):
        folder.remove()
    assert not first.path.exists()


def test_the_folder_of_another_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    left = abandoned("left")
    monkeypatch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
    PrivateFolder().remove()
    assert left.exists()


def test_a_folder_that_another_process_has_locked_to_remove_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Path] = []

    def lock(folder: Path) -> int | None:
        if refused:
            return lock_folder(folder)
        refused.append(folder)
        return None

    monkeypatch.setattr(private_folder, "lock_folder", lock)
    folder = PrivateFolder()
    assert folder.path != refused[0]
    assert not refused[0].exists()
    folder.remove()
