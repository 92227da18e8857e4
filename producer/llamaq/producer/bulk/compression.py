"""Reads and writes compressed files: gzip with the standard library, and Zstandard with Python 3.14 or pyarrow."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from llamaq.producer.bulk.pyarrow_import import pyarrow_module

GZIP, ZSTD = ".gz", ".zst"
_NAMES = {GZIP: ("gzip", "gzip"), ZSTD: ("Zstandard", "zstd")}
"""For each suffix: the name of the format, and the program that checks a file."""
_FIRST_BYTES = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD}


def compression_of(path: Path) -> str | None:
    """Return the suffix that says how a file is compressed. None: its name has no such suffix."""
    suffix = path.suffix.lower()
    return suffix if suffix in _NAMES else None


def uncompressed_path(path: Path) -> Path:
    """Return the path without the suffix of a compression."""
    return path if compression_of(path) is None else path.with_suffix("")


def compression_in(content: bytes) -> str | None:
    """Return the suffix of the compression that bytes begin with. None: they do not begin like a compressed file."""
    return next((suffix for first, suffix in _FIRST_BYTES.items() if content.startswith(first)), None)


def check_can_open(path: Path) -> None:
    """Check that the library for the compression of a file is installed. Raises `MissingExtra` if it is not."""
    if compression_of(path) == ZSTD and _zstd_module() is None:
        _pyarrow()


@contextmanager
def decompressed(file: io.RawIOBase, compression: str | None, read_bytes: int) -> Iterator[io.BufferedReader[Any]]:
    """Yield the content of an open file, which is closed at the end of the context. It is decompressed in parts, so its
    size does not matter.

    Args:
        file: The file. A compressed one may consist of several members or frames.
        compression: The suffix that says how it is compressed. None: it is not compressed.
        read_bytes: Size of the parts that are read.

    Raises:
        OSError: The file cannot be read, or its compressed data is damaged, incomplete, or followed by other data.
        MissingExtra: The library for this compression is not installed.
    """
    with io.BufferedReader(file, read_bytes) as buffered:
        if compression is None:
            yield buffered
            return
        with io.BufferedReader(_DecompressedBytes(buffered, compression), read_bytes) as content:
            yield content


class _DecompressedBytes(io.RawIOBase):
    """The decompressed bytes of a file. Each error of its data is an `OSError`."""

    def __init__(self, file: io.BufferedReader[Any], compression: str) -> None:
        self._name, self._program = _NAMES[compression]
        self._errors: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, zlib.error)
        self._source: Any
        if compression == GZIP:
            self._source = gzip.GzipFile(fileobj=file, mode="rb")
        elif (zstd := _zstd_module()) is not None:
            self._source = zstd.ZstdFile(file)
            self._errors += (zstd.ZstdError,)
        else:
            arrow = _pyarrow()
            self._source = arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self._source.readinto(buffer)
        except self._errors as exc:
            raise OSError(
                f"its {self._name} data is damaged, incomplete, or followed by other data ({exc}); {self._program} -t "
                "checks a file"
            ) from exc
        return count


@contextmanager
def compressing(path: Path, compression: str | None) -> Iterator[BinaryIO]:
    """Yield a new file. What is written to it is compressed.

    Args:
        path: The file to write.
        compression: The suffix that says how to compress it. None: it is not compressed.

    Raises:
        OSError: The file cannot be written.
        MissingExtra: The library for this compression is not installed.
    """
    with path.open("wb") as file:
        if compression is None:
            yield file
            return
        target: Any
        if compression == GZIP:
            target = gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0)
        elif (zstd := _zstd_module()) is not None:
            target = zstd.ZstdFile(file, "wb")
        else:
            arrow = _pyarrow()
            target = arrow.CompressedOutputStream(arrow.PythonFile(file, mode="w"), "zstd")
        with target:
            yield target


def _zstd_module() -> Any:
    """Return the module of the standard library for Zstandard. None: this Python is older than 3.14."""
    try:
        return importlib.import_module("compression.zstd")
    except ModuleNotFoundError:
        return None


def _pyarrow() -> Any:
    return pyarrow_module("pyarrow", "a .zst file before Python 3.14")
