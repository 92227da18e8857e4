"""Reads the content of an input file, and detects that the file has changed since the run began."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, Field

from llamaq.producer.bulk.compression import compression_of, decompressed

READ_BYTES = 1024 * 1024


class InputChanged(Exception):
    """The input file was changed after the run began."""


class Fingerprint(BaseModel):
    """What is known about an input file, to notice that it has changed."""

    n_bytes: int
    mtime_ns: int
    sha256: str
    n_rows: int
    n_content_bytes: int | None = Field(None, description="Size of the decompressed content. None: it is `n_bytes`.")

    @property
    def max_rows(self) -> int:
        """Upper bound on the numbers of rows: a line has at least one byte."""
        return max(self.n_content_bytes or self.n_bytes, self.n_rows)

    def describes(self, status: os.stat_result) -> bool:
        """Return whether the file has not been written since then, judged by its size and time."""
        return (status.st_size, status.st_mtime_ns) == (self.n_bytes, self.mtime_ns)


class DigestedBytes(io.RawIOBase):
    """The bytes of a file. It counts the bytes that were read, and computes their digest."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._digest = sha256()
        self.n_bytes = 0

    @property
    def sha256(self) -> str:
        """The digest of the bytes that were read."""
        return self._digest.hexdigest()

    def readable(self) -> bool:
        """Return that the bytes can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer, and return their number. 0: the end of the file."""
        count = self._file.readinto(buffer) or 0
        self._digest.update(memoryview(buffer)[:count])
        self.n_bytes += count
        return count


class _DescribedBytes(DigestedBytes):
    """The bytes of a file that its fingerprint describes, without bytes that were appended later."""

    def __init__(self, file: io.FileIO, fingerprint: Fingerprint) -> None:
        super().__init__(file)
        self._fingerprint = fingerprint

    def readinto(self, buffer: Any) -> int:
        n_left = self._fingerprint.n_bytes - self.n_bytes
        count = super().readinto(memoryview(buffer)[:n_left])
        if not count and self.sha256 != self._fingerprint.sha256:
            raise InputChanged
        return count


@contextmanager
def open_described(path: Path, fingerprint: Fingerprint) -> Iterator[BinaryIO]:
    """Open a file to read the content that its fingerprint describes.

    Raises:
        InputChanged: The end was read, and the bytes are others. Or they cannot be decompressed, and the file has
            changed.
    """
    with path.open("rb", buffering=0) as file:
        try:
            with decompressed(_DescribedBytes(file, fingerprint), compression_of(path), READ_BYTES) as content:
                yield content
        except OSError as exc:
            if not fingerprint.describes(os.fstat(file.fileno())):
                raise InputChanged from exc
            raise
