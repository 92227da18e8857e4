"""A damaged or missing file of the disk tier is never read as other data, and causes no error."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.disk_blocks import Disk, Warnings

from llamaq.worker.offload.disk_format import HEADER, fingerprint_key


def test_a_file_that_is_damaged_later_removes_its_block_and_the_descendants(tmp_path: Path, warnings: Warnings) -> None:
    with Disk(tmp_path) as disk:
        disk.insert(range(8))
        disk.flush()
        path = disk.paths[1]
        path.write_bytes(path.read_bytes()[:-30] + b"x" + path.read_bytes()[-29:])
        assert disk.read(range(8)) == [b"data\x02", None, b"data\x06", b"data\x08"]
        disk.flush()
        assert len(disk.store) == 1
        disk.flush()
        assert len(disk.paths) == 1
        assert [f"bad_file file={path}" in line for line in warnings] == [True]


def test_a_missing_file_is_a_warning_and_no_error(tmp_path: Path, warnings: Warnings) -> None:
    with Disk(tmp_path) as disk:
        disk.insert([1, 1])
        disk.flush()
        disk.paths[0].unlink()
        assert disk.read([1, 1]) == [None]
        disk.flush()
        assert len(disk.store) == 0
        assert len(list(warnings)) == 1


def damaged(content: bytes, data: st.DataObject) -> bytes:
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "zeros", "garbage", "swap"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "grow":
        return content + data.draw(st.binary(min_size=1, max_size=20))
    if kind == "zeros":
        return content[:at] + bytes(len(content) - at)
    if kind == "garbage":
        return data.draw(st.binary(max_size=300))
    return content[at:] + content[:at]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_damaged_file_is_never_read_as_other_data(data: st.DataObject) -> None:
    logging.disable()
    try:
        with tempfile.TemporaryDirectory() as folder:
            with Disk(Path(folder)) as disk:
                disk.insert([1, 2], bytes(range(50)))
                disk.flush()
                (path,) = disk.paths
                content = path.read_bytes()
                path.write_bytes(damaged(content, data))
                is_same = path.read_bytes() == content
                (read,) = disk.read([1, 2])
                assert read == (bytes(range(50)) + b"\x02" if is_same else None)
            with Disk(Path(folder)) as disk:  # a valid header may precede damaged data
                assert disk.read([1, 2]) in ([], [None], [bytes(range(50)) + b"\x02"])
                if not is_same:
                    assert disk.read([1, 2]) in ([], [None])
    finally:
        logging.disable(logging.NOTSET)


def test_invalid_lengths_in_a_header_are_detected(tmp_path: Path, warnings: Warnings) -> None:
    with Disk(tmp_path) as disk:
        disk.insert([1, 2])
        disk.flush()
        (path,) = disk.paths
    for start, end, n_bytes in [(0, 2**62, 5), (0, 2**40, 2**40), (0, 2, 2**63), (2, 0, 5), (0, 2, 2**64 - 1)]:
        header = HEADER.pack(b"llamaqKV", 1, 0, fingerprint_key("model"), bytes(32), bytes(32), start, end, n_bytes)
        path.write_bytes(header + bytes(40))
        with Disk(tmp_path) as disk:
            assert len(disk.store) == 0
    assert all("torn" in line for line in warnings)
