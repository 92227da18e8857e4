"""Files that a run appends lines to, and files that it replaces. They are whole when they are opened again, also after
a crash.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from llamaq.common.errors import BulkRunBusy, BulkRunRefused


class AppendedFile:
    """An open file, which no other process can open with this class meanwhile."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Use `open` instead."""
        self.path = path
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        """Lines that are not written yet."""
        self._n_bytes = os.fstat(descriptor).st_size
        """Size of the file, as far as this object knows."""

    def __repr__(self) -> str:
        return f"<AppendedFile {self.path} unwritten={len(self._lines)}>"

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Open a file, create it if it does not exist, and lock it.

        Raises:
            BulkRunRefused: The file cannot be opened.
            BulkRunBusy: Another process has opened it.
        """
        with refusing_to_write(path):
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with refusing_to_write(path):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as exc:
                    raise BulkRunBusy(f"{path}: another process executes this run") from exc
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def read_lines(self) -> Iterator[bytes]:
        """Yield the lines of the file. A last line that was not completely written is cut at the end."""
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                yield line
                if line.endswith(b"\n"):
                    end += len(line)
        os.ftruncate(self._descriptor, end)
        self._n_bytes = end

    def clear(self) -> None:
        """Remove the content of the file. Raises `BulkRunRefused` like `flush`."""
        self.check_unchanged()
        with refusing_to_write(self.path):
            os.ftruncate(self._descriptor, 0)
        self._n_bytes = 0

    def append(self, line: bytes) -> None:
        """Append a line. `flush` writes it."""
        self._lines.append(line)

    def flush(self) -> None:
        """Pass the lines to the operating system: they survive the end of this process, also a crash.

        Raises:
            BulkRunRefused: They cannot be written, for example because the disk is full. Or another program has
                deleted, replaced or changed the file.
        """
        data, self._lines = memoryview(b"".join(self._lines)), []
        if data:
            self.check_unchanged()
        with refusing_to_write(self.path):
            while data:
                n_written = os.write(self._descriptor, data)
                self._n_bytes += n_written
                data = data[n_written:]

    def check_unchanged(self) -> None:
        """Check that the path still names this file, with the bytes that this object has read or written.

        Raises:
            BulkRunRefused: Another program has deleted, replaced or changed the file. Further lines would be lost.
        """
        own = os.fstat(self._descriptor)
        try:
            is_named = os.path.samestat(own, self.path.stat())
        except OSError:
            is_named = False
        if not is_named or own.st_size != self._n_bytes:
            raise BulkRunRefused(
                f"{self.path} was deleted, replaced or changed by another program: start the same run again to compute "
                "the rows that are missing"
            )

    def sync(self) -> None:
        """Write everything to the disk. Raises `BulkRunRefused` like `flush`."""
        self.flush()
        if self._n_bytes:
            self.check_unchanged()
        with refusing_to_write(self.path):
            os.fsync(self._descriptor)


@contextmanager
def refusing_to_write(path: Path) -> Iterator[None]:
    """Raise `BulkRunRefused` if a file cannot be written within this context."""
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise BulkRunRefused(f"{path} cannot be written: {reason}. Start the same run again when it can") from exc


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` at the end of the context.

    A crash leaves the earlier file or the new one. An error leaves the earlier one, and removes the new one, which may
    have filled the disk.
    """
    new = path.with_name(path.name + ".new")
    try:
        yield new
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
