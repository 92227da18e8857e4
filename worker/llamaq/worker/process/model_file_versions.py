"""Notices that a file was replaced while the model was loaded.

The worker's card and the fingerprint of the prefix cache are read from the files after the model is loaded. If a file
was replaced meanwhile, they would describe another model than the loaded one.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from llamaq.common.errors import ModelError
from llamaq.worker.engine.model_files import files_of_model, resolve_model_file
from llamaq.worker.settings import WorkerSettings


class _Version(NamedTuple):
    """What a file has that another file of the same path has not. Some network file systems change inode numbers."""

    n_bytes: int
    changed_ns: int


class ModelFileVersions:
    """The versions of the files of a model, its adapters and its control vectors. Create it before they are read.

    Args:
        path: The file of the model. If the model is split into several files, the first of them.
        settings: The settings of the worker.

    Raises:
        ModelError: An adapter or a control vector does not exist or cannot be downloaded.
    """

    def __init__(self, path: Path, settings: WorkerSettings) -> None:
        added = {"--lora": settings.lora_scales, "--control-vector": settings.control_vector_scales}
        self._versions = {each: ("--model", _version(each)) for each in files_of_model(path)}
        for setting, scales in added.items():
            paths = (resolve_model_file(name, setting) for name, _ in scales)
            self._versions.update({each: (setting, _version(each)) for each in paths})

    def check(self) -> None:
        """Raise `ModelError` if one of the files is no longer the same."""
        for path, (setting, version) in self._versions.items():
            if _version(path) != version:
                raise ModelError(f"{setting}: {path} was replaced while it was loaded; start the worker again")


def _version(path: Path) -> _Version | None:
    """Return the version of a file, or None if it cannot be looked up."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _Version(status.st_size, status.st_mtime_ns)
