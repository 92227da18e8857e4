"""The files of saved slots: one file `<folder>/slots/<name>.slot` for each name that a user has given.

Each file has these fields, with their sizes in bytes:

    header     magic (8), format version (4), size of the metadata (4), key of the fingerprint (32),
               size of the tokens (8), size of the data (8)
    metadata   as JSON
    tokens     packed tokens
    data       the parts of the state, see `slot_state_parts`
    checksum   crc32 of all preceding bytes (4)

Because a user requested each of these files, they are synced to disk and never evicted. Several workers may share the
folder.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llamaq.common.errors import InvalidRequest
from llamaq.worker.core.packed_tokens import TOKEN_BYTES
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
"""An unfinished file that is older than this is erased, because the process that wrote it has died."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class SavedSlotInfo:
    """The header of a saved state's file."""

    name: str
    meta: dict[str, Any]
    """The metadata that was given to `SavedSlotFiles.write`."""
    n_tokens: int
    n_bytes: int
    """Length of the data in bytes."""
    saved_s: float
    """Time of the save, as Unix time in seconds."""
    is_usable: bool
    """Whether this worker can restore the state. True if the file has the fingerprint of this worker."""


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A saved state."""

    info: SavedSlotInfo
    tokens: bytes
    """Packed tokens."""
    data: bytes
    """The encoded parts of the state, see `slot_state_parts`."""


class SavedSlotFiles:
    """The saved states of one folder.

    Every method waits for the disk, so call the methods in a background thread. Every method raises `InvalidRequest`
    when the name or the file is invalid, and `OSError` when the disk is full or refuses to write.
    """

    def __init__(self, folder: Path, fingerprint: str, *, max_file_bytes: int) -> None:
        """Set the folder, which the first `write` creates.

        Args:
            folder: The cache folder. The files are in its subfolder `slots`.
            fingerprint: Identifies the model, the settings and the llama.cpp version that the data is valid for.
            max_file_bytes: Larger files are neither written nor read.
        """
        self.folder = folder / "slots"
        self._fingerprint = fingerprint_key(fingerprint)
        self._max_file_bytes = max_file_bytes

    def write(self, name: str, meta: dict[str, Any], tokens: bytes, data: bytes) -> SavedSlotInfo:
        """Save a state under this name. Replaces an existing state of this name.

        Args:
            name: 1 to 64 characters, each of them a letter A-Z or a-z, a digit, `_` or `-`.
            meta: Metadata. Its JSON has at most 64 KiB.
            tokens: Packed tokens.
            data: The encoded parts of the state.
        """
        path = self._path(name)
        text = json.dumps(meta, separators=(",", ":")).encode()
        if len(text) > MAX_META_BYTES:
            raise InvalidRequest(f"slot state {name!r}: {len(text)} bytes of metadata, {MAX_META_BYTES} are allowed")
        header = HEADER.pack(MAGIC, FORMAT, len(text), self._fingerprint, len(tokens), len(data))
        size = len(header) + len(text) + len(tokens) + len(data) + CHECKSUM_BYTES
        if size > self._max_file_bytes:
            raise InvalidRequest(
                f"slot state {name!r}: a file of {size} bytes, {self._max_file_bytes} are allowed (the larger of "
                "--cache-ram-mb and --cache-disk-mb)"
            )
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private_folder(self.folder)
        self._remove_abandoned()
        parts = (header, text, tokens, data)
        write_file(path, *parts, checksum(*parts), is_synced=True)
        return self._info(path)

    def read(self, name: str) -> SavedSlot:
        """Read and verify the state with this name."""
        path = self._path(name)
        with self._open(path) as file:
            info, parts = self._read_header(file, name)
            if not info.is_usable:
                raise InvalidRequest(f"slot state {name!r} was saved with another model or other settings")
            parts.append(read_up_to(file, info.n_tokens * TOKEN_BYTES))
            parts.append(read_up_to(file, info.n_bytes))
            if read_up_to(file, CHECKSUM_BYTES) != checksum(*parts):
                raise _damaged_error(name)
        return SavedSlot(info, *parts[-2:])

    def erase(self, name: str) -> None:
        """Erase the file with this name."""
        try:
            self._path(name).unlink()
        except FileNotFoundError as exc:
            raise _unknown_name_error(name) from exc

    def list_all(self) -> list[SavedSlotInfo]:
        """Return all saved states sorted by name, including those of other models. Damaged files are skipped."""
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
            return self._read_header(file, name)[0]

    def _read_header(self, file: BinaryIO, name: str) -> tuple[SavedSlotInfo, list[bytes]]:
        """Read and verify everything before the tokens.

        Returns:
            The decoded header, and the bytes of the header and the metadata.
        """
        size = file_size(file)
        fixed = read_up_to(file, HEADER.size)
        if len(fixed) < HEADER.size:
            raise _damaged_error(name)
        magic, version, n_meta, fingerprint, n_token_bytes, n_bytes = HEADER.unpack(fixed)
        if (magic, version) != (MAGIC, FORMAT):
            raise _damaged_error(name)
        expected = HEADER.size + n_meta + n_token_bytes + n_bytes + CHECKSUM_BYTES
        if size != expected or size > self._max_file_bytes or n_meta > MAX_META_BYTES or n_token_bytes % TOKEN_BYTES:
            raise _damaged_error(name)
        text = read_up_to(file, n_meta)
        try:
            meta = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise _damaged_error(name) from exc
        if not isinstance(meta, dict):
            raise _damaged_error(name)
        saved_s = os.fstat(file.fileno()).st_mtime
        is_usable = fingerprint == self._fingerprint
        return SavedSlotInfo(name, meta, n_token_bytes // TOKEN_BYTES, n_bytes, saved_s, is_usable), [fixed, text]

    def _open(self, path: Path) -> BinaryIO:
        name = path.name.removesuffix(SUFFIX)
        try:
            return open_file(path)
        except FileNotFoundError as exc:
            raise _unknown_name_error(name) from exc
        except OSError as exc:
            raise InvalidRequest(f"slot state {name!r} cannot be read: {exc.strerror or exc}") from exc

    def _path(self, name: str) -> Path:
        """Return the path of the file with this name. Raises `InvalidRequest` for a name that is not allowed."""
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"slot state {name[:80]!r}: a name has 1 to 64 of A-Z a-z 0-9 _ -")
        return self.folder / (name + SUFFIX)

    def _remove_abandoned(self) -> None:
        for path in self.folder.glob("*" + TEMPORARY):
            with suppress(FileNotFoundError):  # another worker has just finished its file
                if path.stat().st_mtime < time.time() - ABANDONED_S:
                    path.unlink()

    def __repr__(self) -> str:
        return f"<SavedSlotFiles {self.folder}>"


def _unknown_name_error(name: str) -> InvalidRequest:
    return InvalidRequest(f"no slot state is saved as {name!r}")


def _damaged_error(name: str) -> InvalidRequest:
    return InvalidRequest(f"slot state {name!r} is damaged, of another version, or larger than is allowed")
