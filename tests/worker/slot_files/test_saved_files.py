"""Slots' states under names: saved wholly or not at all, given back verified, and no name is a path."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamaq.common.errors import InvalidRequest
from llamaq.worker.slot_files.saved_files import HEADER, MAX_META_BYTES, SavedSlotFiles

TOKENS = bytes(range(12))
ROOMY = 10**6


@pytest.fixture
def slots(tmp_path: Path) -> SavedSlotFiles:
    return SavedSlotFiles(tmp_path / "cache", "model", max_file_bytes=ROOMY)


def path_of(slots: SavedSlotFiles, name: str = "chat") -> Path:
    return slots.folder / f"{name}.slot"


def test_what_was_saved_under_a_name_comes_back(slots: SavedSlotFiles) -> None:
    written = slots.write("my-chat_1", {"salt": "ä", "public": 3}, TOKENS, b"cells")
    saved = slots.read("my-chat_1")
    assert saved.info == written
    assert (saved.info.name, saved.info.meta) == ("my-chat_1", {"salt": "ä", "public": 3})
    assert (saved.tokens, saved.data) == (TOKENS, b"cells")
    assert (saved.info.n_tokens, saved.info.n_bytes, saved.info.is_usable) == (3, 5, True)
    assert saved.info.saved_s == path_of(slots, "my-chat_1").stat().st_mtime


def test_a_name_that_is_saved_again_has_the_new_state(slots: SavedSlotFiles) -> None:
    slots.write("chat", {}, TOKENS, b"old")
    slots.write("chat", {}, TOKENS[:4], b"new and longer")
    assert slots.read("chat").data == b"new and longer"
    assert [path.name for path in slots.folder.iterdir()] == ["chat.slot"]


def test_saved_states_are_listed_and_erased_by_name(slots: SavedSlotFiles) -> None:
    assert slots.list_all() == []
    for name in ("b", "a"):
        slots.write(name, {"n": name}, TOKENS, b"cells")
    path_of(slots, "damaged").write_bytes(b"")
    (slots.folder / "not a name.slot").write_bytes(b"")
    assert [(info.name, info.meta) for info in slots.list_all()] == [("a", {"n": "a"}), ("b", {"n": "b"})]
    slots.erase("a")
    assert [info.name for info in slots.list_all()] == ["b"]
    with pytest.raises(InvalidRequest, match="no slot state is saved as 'a'"):
        slots.erase("a")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "/etc/passwd", "a.slot", "a\0", "a\n", "ä", "a" * 65, "a b", "~", "C:\\a"]
)
def test_a_name_is_never_a_path(slots: SavedSlotFiles, name: str) -> None:
    for refused in (
        lambda: slots.write(name, {}, TOKENS, b""),
        lambda: slots.read(name),
        lambda: slots.erase(name),
    ):
        with pytest.raises(InvalidRequest, match="a name has 1 to 64"):
            refused()
    assert not slots.folder.exists()


def test_a_state_of_another_model_is_listed_but_not_given_back(slots: SavedSlotFiles, tmp_path: Path) -> None:
    SavedSlotFiles(tmp_path / "cache", "another", max_file_bytes=ROOMY).write("chat", {}, TOKENS, b"cells")
    assert [info.is_usable for info in slots.list_all()] == [False]
    with pytest.raises(InvalidRequest, match="another model"):
        slots.read("chat")


def test_only_this_user_can_read_saved_states(slots: SavedSlotFiles) -> None:
    before = os.umask(0)
    try:
        slots.write("chat", {}, TOKENS, b"cells")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path_of(slots).stat().st_mode) == 0o600
    assert [stat.S_IMODE(each.stat().st_mode) for each in (slots.folder, slots.folder.parent)] == [0o700, 0o700]


def test_what_is_too_large_is_refused(slots: SavedSlotFiles) -> None:
    with pytest.raises(InvalidRequest, match="1000000 are allowed"):
        slots.write("chat", {}, TOKENS, bytes(ROOMY))
    with pytest.raises(InvalidRequest, match="of metadata"):
        slots.write("chat", {"text": "x" * MAX_META_BYTES}, TOKENS, b"")
    slots.write("chat", {}, TOKENS, bytes(1000))
    small = SavedSlotFiles(slots.folder.parent, "model", max_file_bytes=1000)
    with pytest.raises(InvalidRequest, match="larger than is allowed"):
        small.read("chat")


def test_a_link_is_not_followed(slots: SavedSlotFiles, tmp_path: Path) -> None:
    slots.write("chat", {}, TOKENS, b"cells")
    path_of(slots).rename(tmp_path / "elsewhere")
    path_of(slots).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        slots.read("chat")
    slots.write("chat", {}, TOKENS, b"new")
    assert slots.read("chat").data == b"new"
    assert not path_of(slots).is_symlink()


def test_unfinished_files_go_when_no_writer_can_be_at_them_any_more(slots: SavedSlotFiles) -> None:
    slots.write("chat", {}, TOKENS, b"cells")
    old, new = slots.folder / "old.tmp", slots.folder / "new.tmp"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (1000, 1000))
    slots.write("chat", {}, TOKENS, b"cells")
    assert (old.exists(), new.exists()) == (False, True)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_is_refused_and_never_a_crash(slots: SavedSlotFiles, data: st.DataObject) -> None:
    slots.write("chat", {"a": 1}, TOKENS, bytes(range(60)))
    content = path_of(slots).read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    flipped = bytes([content[at] ^ data.draw(st.integers(1, 255))])
    bad = data.draw(
        st.sampled_from([content[:at] + flipped + content[at + 1 :], content[:at], content + flipped, flipped * at])
    )
    path_of(slots).write_bytes(bad)
    with pytest.raises(InvalidRequest):
        slots.read("chat")
    slots.list_all()


def test_a_header_is_not_believed_before_the_lengths_fit(slots: SavedSlotFiles) -> None:
    slots.write("chat", {}, TOKENS, b"cells")
    magic, version, _, fingerprint, *_ = HEADER.unpack(path_of(slots).read_bytes()[: HEADER.size])
    for n_meta, n_tokens, n_bytes in [(2**32 - 1, 0, 0), (0, 2**63, 2**63), (2, 12, 2**40), (2, 2**64 - 1, 31)]:
        header = HEADER.pack(magic, version, n_meta, fingerprint, n_tokens, n_bytes)
        path_of(slots).write_bytes(header + bytes(50))
        with pytest.raises(InvalidRequest, match="damaged"):
            slots.read("chat")
