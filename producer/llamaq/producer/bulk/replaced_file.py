"""Replaces a file by a new one that was written completely."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
