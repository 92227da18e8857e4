"""Finds the file of a model, and downloads models of the Hugging Face hub."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from llamaq.common.errors import MissingExtra, ModelError

_SPLIT_NAME = re.compile(r"(?P<beginning>.+)-00001-of-(?P<count>\d{5})\.gguf")
_HUB_NAME = re.compile(r"^hf:(?P<repo>[\w.\-]+/[\w.\-]+)/(?P<file>[\w.\-/]+\.gguf)$")


def demo_model_path() -> Path:
    """Return the path of the small model in this package, described in its MODEL_CARD.md."""
    return Path(str(files("llamaq.worker").joinpath("model", "llamaq-demo.gguf")))


def resolve_model_file(spec: str | None, setting: str = "--model") -> Path:
    """Return the path of a model file, downloading the file if necessary.

    Args:
        spec: A path, or `hf:OWNER/REPO/FILE.gguf` for a file of the Hugging Face hub. None means the demo model.
        setting: The setting that an error names.

    Raises:
        ModelError: The file does not exist, cannot be looked up, or cannot be downloaded.
        MissingExtra: `spec` names a file of the hub, and huggingface_hub is not installed.
    """
    if spec is None:
        return demo_model_path()
    if spec.startswith("hf:"):
        return _download(spec, setting)
    try:
        path = Path(spec).expanduser()
        is_file = path.is_file()
    except (OSError, RuntimeError) as exc:  # the user may not enter the folder; there is no user of that name
        raise ModelError(f"{setting}: {spec!r} cannot be read: {exc}") from exc
    if not is_file:
        raise ModelError(f"{setting}: there is no file {spec!r} (for the Hugging Face hub: hf:OWNER/REPO/FILE.gguf)")
    return path


def names_of_files(first: str) -> list[str]:
    """Return the names of all files of a model, which llama.cpp finds by the name of the first one."""
    split = _SPLIT_NAME.fullmatch(first)
    if split is None:
        return [first]
    count = int(split["count"])
    return [f"{split['beginning']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def files_of_model(first: Path) -> list[Path]:
    """Return all files of a model that exist, the given one first. A model may be split into several files."""
    others = (first.with_name(name) for name in names_of_files(first.name)[1:])
    return [first, *(path for path in others if _is_file(path))]


def _is_file(path: Path) -> bool:
    """Return whether there is a file that can be looked up. A link may lead to a folder that the user may not enter."""
    try:
        return path.is_file()
    except OSError:
        return False


def _download(spec: str, setting: str) -> Path:
    match = _HUB_NAME.fullmatch(spec)
    if match is None:
        raise ModelError(f"{setting}: {spec!r} is not of the form hf:OWNER/REPO/FILE.gguf")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as exc:
        raise MissingExtra(f"{setting} hf:…", "hub") from exc
    try:
        paths = [Path(hf_hub_download(match["repo"], name)) for name in names_of_files(match["file"])]
        return paths[0]
    except LocalEntryNotFoundError as exc:
        raise ModelError(
            f"{setting}: {spec} is not in the local cache and the hub cannot be reached; "
            "download the file on a machine with network access, and give its path"
        ) from exc
    except (HfHubHTTPError, OSError, ValueError) as exc:  # ValueError: not a valid name of a repository
        raise ModelError(f"{setting}: {spec} cannot be downloaded: {exc}") from exc
