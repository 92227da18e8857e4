"""Reads an input file, and detects that it has changed since the run began."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel

READ_BYTES = 1024 * 1024


class InputChanged(Exception):
    """The input file was changed after the run began."""


class Fingerprint(BaseModel):
    """What is known about an input file, to notice that it has changed."""

    n_bytes: int
    mtime_ns: int
    sha256: str
    n_rows: int

    def describes(self, status: os.stat_result) -> bool:
        """Return whether the file has not been written since then, judged by its size and time."""
        return (status.st_size, status.st_mtime_ns) == (self.n_bytes, self.mtime_ns)


class _DescribedBytes(io.RawIOBase):
    """The bytes of a file that its fingerprint describes, without bytes that were appended later."""

    def __init__(self, file: io.FileIO, fingerprint: Fingerprint) -> None:
        self._file = file
        self._fingerprint = fingerprint
        self._n_left = fingerprint.n_bytes
        self._digest = sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._file.read(min(len(buffer), self._n_left)) or b""
        buffer[: len(part)] = part
        self._n_left -= len(part)
        self._digest.update(part)
        if not part and self._digest.hexdigest() != self._fingerprint.sha256:
            raise InputChanged
        return len(part)


@contextmanager
def open_described(path: Path, fingerprint: Fingerprint) -> Iterator[BinaryIO]:
    """Open a file to read the bytes that its fingerprint describes.

    Raises:
        InputChanged: The end was read, and the bytes are others.
    """
    with (
        path.open("rb", buffering=0) as file,
        io.BufferedReader(_DescribedBytes(file, fingerprint), READ_BYTES) as described,
    ):
        yield described
