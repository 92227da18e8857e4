"""Slots' states under names that users give: `<folder>/slots/<name>.slot`, one file each.

    magic 8 | format 4 | meta length 4 | fingerprint 32 | tokens' length 8 | data length 8
    meta as JSON | packed tokens | data | crc32 of all before 4

These are written on purpose, so they are synced and no limit evicts them. Several workers may share the folder.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llamaq.common.errors import InvalidRequest
from llamaq.worker.core.tokens import TOKEN_BYTES
from llamaq.worker.offload.atomic_files import (
    TEMPORARY,
    file_size,
    make_private_folder,
    open_file,
    read_up_to,
    write_file,
)
from llamaq.worker.offload.disk_format import CHECKSUM_BYTES, checksum, fingerprint_key

MAGIC = b"llamaqSL"
FORMAT = 1
HEADER = struct.Struct("=8sII32sQQ")
SUFFIX = ".slot"
MAX_META_BYTES = 64 * 1024
ABANDONED_S = 3600.0
"""An unfinished file that is older belongs to no writer any more."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class SavedSlotInfo:
    """What a saved state's file says, without its data."""

    name: str
    meta: dict[str, Any]
    n_tokens: int
    n_bytes: int
    """Of the data."""
    saved_s: float
    """When, in seconds of Unix time."""
    is_usable: bool
    """Whether it is of this worker's model and settings."""


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A saved state: its tokens, packed, and the data of their cells."""

    info: SavedSlotInfo
    tokens: bytes
    data: bytes


class SavedSlotFiles:
    """The saved states of one folder. Every method waits for the disk: call them in a background thread.

    `fingerprint` says for which model, settings and llama.cpp the data is good. No file over `max_file_bytes` is
    written or read. What the user got wrong is an `InvalidRequest`; a disk that is full or not writable, an `OSError`.
    """

    def __init__(self, folder: Path, fingerprint: str, *, max_file_bytes: int) -> None:
        self.folder = folder / "slots"
        self._fingerprint = fingerprint_key(fingerprint)
        self._max_file_bytes = max_file_bytes

    def write(self, name: str, meta: dict[str, Any], tokens: bytes, data: bytes) -> SavedSlotInfo:
        """Save a state in place of what has this name. `meta` is anything JSON can say in 64 KiB."""
        path = self._path(name)
        text = json.dumps(meta, separators=(",", ":")).encode()
        if len(text) > MAX_META_BYTES:
            raise InvalidRequest(f"slot state {name!r}: {len(text)} bytes of meta data, {MAX_META_BYTES} are allowed")
        header = HEADER.pack(MAGIC, FORMAT, len(text), self._fingerprint, len(tokens), len(data))
        size = len(header) + len(text) + len(tokens) + len(data) + CHECKSUM_BYTES
        if size > self._max_file_bytes:
            raise InvalidRequest(f"slot state {name!r}: a file of {size} bytes, {self._max_file_bytes} are allowed")
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private_folder(self.folder)
        self._remove_abandoned()
        parts = (header, text, tokens, data)
        write_file(path, *parts, checksum(*parts), is_synced=True)
        return self._info(path)

    def read(self, name: str) -> SavedSlot:
        """The state of this name, verified."""
        path = self._path(name)
        with self._open(path) as file:
            info, parts = self._read_head(file, name)
            if not info.is_usable:
                raise InvalidRequest(f"slot state {name!r} was saved with another model or other settings")
            parts.append(read_up_to(file, info.n_tokens * TOKEN_BYTES))
            parts.append(read_up_to(file, info.n_bytes))
            if read_up_to(file, CHECKSUM_BYTES) != checksum(*parts):
                raise _damaged(name)
        return SavedSlot(info, *parts[-2:])

    def erase(self, name: str) -> None:
        """Remove the state of this name."""
        try:
            self._path(name).unlink()
        except FileNotFoundError as exc:
            raise _unknown(name) from exc

    def list_all(self) -> list[SavedSlotInfo]:
        """All saved states by name, also those of other models. Damaged files are left out."""
        found = []
        for path in sorted(self.folder.glob("*" + SUFFIX)):
            try:
                found.append(self._info(path))
            except InvalidRequest:
                continue
        return found

    def _info(self, path: Path) -> SavedSlotInfo:
        name = path.name.removesuffix(SUFFIX)
        with self._open(self._path(name)) as file:
            return self._read_head(file, name)[0]

    def _read_head(self, file: BinaryIO, name: str) -> tuple[SavedSlotInfo, list[bytes]]:
        """What comes before the tokens, as it is and read; the lengths it gives are those of the file."""
        size = file_size(file)
        fixed = read_up_to(file, HEADER.size)
        if len(fixed) < HEADER.size:
            raise _damaged(name)
        magic, version, n_meta, fingerprint, n_token_bytes, n_bytes = HEADER.unpack(fixed)
        if (magic, version) != (MAGIC, FORMAT):
            raise _damaged(name)
        expected = HEADER.size + n_meta + n_token_bytes + n_bytes + CHECKSUM_BYTES
        if size != expected or size > self._max_file_bytes or n_meta > MAX_META_BYTES or n_token_bytes % TOKEN_BYTES:
            raise _damaged(name)
        text = read_up_to(file, n_meta)
        try:
            meta = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise _damaged(name) from exc
        if not isinstance(meta, dict):
            raise _damaged(name)
        saved_s = os.fstat(file.fileno()).st_mtime
        is_usable = fingerprint == self._fingerprint
        return SavedSlotInfo(name, meta, n_token_bytes // TOKEN_BYTES, n_bytes, saved_s, is_usable), [fixed, text]

    def _open(self, path: Path) -> BinaryIO:
        name = path.name.removesuffix(SUFFIX)
        try:
            return open_file(path)
        except FileNotFoundError as exc:
            raise _unknown(name) from exc
        except OSError as exc:
            raise InvalidRequest(f"slot state {name!r} cannot be read: {exc.strerror or exc}") from exc

    def _path(self, name: str) -> Path:
        """The file of this name. A name is never a path."""
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"slot state {name[:80]!r}: a name has 1 to 64 of A-Z a-z 0-9 _ -")
        return self.folder / (name + SUFFIX)

    def _remove_abandoned(self) -> None:
        for path in self.folder.glob("*" + TEMPORARY):
            if path.stat().st_mtime < time.time() - ABANDONED_S:
                path.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"<SavedSlotFiles {self.folder}>"


def _unknown(name: str) -> InvalidRequest:
    return InvalidRequest(f"no slot state is saved as {name!r}")


def _damaged(name: str) -> InvalidRequest:
    return InvalidRequest(f"slot state {name!r} is damaged, of another version, or larger than is allowed")
