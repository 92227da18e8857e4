"""The files of saved slots: written completely or not at all, verified by every read, and no name is a path."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamaq.common.errors import InvalidRequest
from llamaq.worker.slot_files.saved_slot_files import HEADER, MAX_META_BYTES, SavedSlotFiles

TOKENS = bytes(range(12))
ROOMY = 10**6


@pytest.fixture
def files(tmp_path: Path) -> SavedSlotFiles:
    return SavedSlotFiles(tmp_path / "cache", "model", max_file_bytes=ROOMY)


def path_of(files: SavedSlotFiles, name: str = "chat") -> Path:
    return files.folder / f"{name}.slot"


def test_a_read_returns_the_state_that_was_written_under_the_name(files: SavedSlotFiles) -> None:
    written = files.write("my-chat_1", {"salt": "ä", "public": 3}, TOKENS, b"cells")
    saved = files.read("my-chat_1")
    assert saved.info == written
    assert (saved.info.name, saved.info.meta) == ("my-chat_1", {"salt": "ä", "public": 3})
    assert (saved.tokens, saved.data) == (TOKENS, b"cells")
    assert (saved.info.n_tokens, saved.info.n_bytes, saved.info.is_usable) == (3, 5, True)
    assert saved.info.saved_s == path_of(files, "my-chat_1").stat().st_mtime


def test_a_second_write_under_a_name_replaces_the_state(files: SavedSlotFiles) -> None:
    files.write("chat", {}, TOKENS, b"old")
    files.write("chat", {}, TOKENS[:4], b"new and longer")
    assert files.read("chat").data == b"new and longer"
    assert [path.name for path in files.folder.iterdir()] == ["chat.slot"]


def test_saved_states_are_listed_and_erased_by_name(files: SavedSlotFiles) -> None:
    assert files.list_all() == []
    for name in ("b", "a"):
        files.write(name, {"n": name}, TOKENS, b"cells")
    path_of(files, "damaged").write_bytes(b"")
    (files.folder / "not a name.slot").write_bytes(b"")
    assert [(info.name, info.meta) for info in files.list_all()] == [("a", {"n": "a"}), ("b", {"n": "b"})]
    files.erase("a")
    assert [info.name for info in files.list_all()] == ["b"]
    with pytest.raises(InvalidRequest, match="no slot state is saved as 'a'"):
        files.erase("a")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "/etc/passwd", "a.slot", "a\0", "a\n", "ä", "a" * 65, "a b", "~", "C:\\a"]
)
def test_a_name_is_never_a_path(files: SavedSlotFiles, name: str) -> None:
    for refused in (
        lambda: files.write(name, {}, TOKENS, b""),
        lambda: files.read(name),
        lambda: files.erase(name),
    ):
        with pytest.raises(InvalidRequest, match="a name has 1 to 64"):
            refused()
    assert not files.folder.exists()


def test_a_state_of_another_model_is_listed_but_cannot_be_read(files: SavedSlotFiles, tmp_path: Path) -> None:
    SavedSlotFiles(tmp_path / "cache", "another", max_file_bytes=ROOMY).write("chat", {}, TOKENS, b"cells")
    assert [info.is_usable for info in files.list_all()] == [False]
    with pytest.raises(InvalidRequest, match="another model"):
        files.read("chat")


def test_only_this_user_can_read_saved_states(files: SavedSlotFiles) -> None:
    before = os.umask(0)
    try:
        files.write("chat", {}, TOKENS, b"cells")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path_of(files).stat().st_mode) == 0o600
    assert [stat.S_IMODE(each.stat().st_mode) for each in (files.folder, files.folder.parent)] == [0o700, 0o700]


def test_files_and_metadata_that_are_too_large_are_refused(files: SavedSlotFiles) -> None:
    with pytest.raises(InvalidRequest, match="1000000 are allowed"):
        files.write("chat", {}, TOKENS, bytes(ROOMY))
    with pytest.raises(InvalidRequest, match="of metadata"):
        files.write("chat", {"text": "x" * MAX_META_BYTES}, TOKENS, b"")
    files.write("chat", {}, TOKENS, bytes(1000))
    small = SavedSlotFiles(files.folder.parent, "model", max_file_bytes=1000)
    with pytest.raises(InvalidRequest, match="larger than is allowed"):
        small.read("chat")


def test_a_link_is_not_followed(files: SavedSlotFiles, tmp_path: Path) -> None:
    files.write("chat", {}, TOKENS, b"cells")
    path_of(files).rename(tmp_path / "elsewhere")
    path_of(files).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        files.read("chat")
    files.write("chat", {}, TOKENS, b"new")
    assert files.read("chat").data == b"new"
    assert not path_of(files).is_symlink()


def test_unfinished_files_are_erased_after_an_hour(files: SavedSlotFiles) -> None:
    files.write("chat", {}, TOKENS, b"cells")
    old, new = files.folder / "old.tmp", files.folder / "new.tmp"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (1000, 1000))
    files.write("chat", {}, TOKENS, b"cells")
    assert (old.exists(), new.exists()) == (False, True)


def test_an_unfinished_file_that_another_worker_finishes_meanwhile_is_ignored(
    files: SavedSlotFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    glob = Path.glob

    def glob_before_a_rename(folder: Path, pattern: str) -> list[Path]:
        return [*glob(folder, pattern), folder / "finished.tmp"]

    monkeypatch.setattr(Path, "glob", glob_before_a_rename)
    files.write("chat", {}, TOKENS, b"cells")
    assert files.read("chat").data == b"cells"


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_is_refused(files: SavedSlotFiles, data: st.DataObject) -> None:
    files.write("chat", {"a": 1}, TOKENS, bytes(range(60)))
    content = path_of(files).read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    flipped = bytes([content[at] ^ data.draw(st.integers(1, 255))])
    bad = data.draw(
        st.sampled_from([content[:at] + flipped + content[at + 1 :], content[:at], content + flipped, flipped * at])
    )
    path_of(files).write_bytes(bad)
    with pytest.raises(InvalidRequest):
        files.read("chat")
    files.list_all()


def test_invalid_lengths_in_a_header_are_refused(files: SavedSlotFiles) -> None:
    files.write("chat", {}, TOKENS, b"cells")
    magic, version, _, fingerprint, *_ = HEADER.unpack(path_of(files).read_bytes()[: HEADER.size])
    for n_meta, n_tokens, n_bytes in [(2**32 - 1, 0, 0), (0, 2**63, 2**63), (2, 12, 2**40), (2, 2**64 - 1, 31)]:
        header = HEADER.pack(magic, version, n_meta, fingerprint, n_tokens, n_bytes)
        path_of(files).write_bytes(header + bytes(50))
        with pytest.raises(InvalidRequest, match="damaged"):
            files.read("chat")
