"""Finds the file of a model, and downloads models of the Hugging Face hub."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from llamaq.common.errors import MissingExtra, ModelError

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
        ModelError: The file does not exist or cannot be downloaded.
        MissingExtra: `spec` names a file of the hub, and huggingface_hub is not installed.
    """
    if spec is None:
        return demo_model_path()
    if spec.startswith("hf:"):
        return _download(spec, setting)
    path = Path(spec).expanduser()
    if not path.is_file():
        raise ModelError(f"{setting}: there is no file {spec!r} (for the Hugging Face hub: hf:OWNER/REPO/FILE.gguf)")
    return path


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
        return Path(hf_hub_download(match["repo"], match["file"]))
    except LocalEntryNotFoundError as exc:
        raise ModelError(
            f"{setting}: {spec} is not in the local cache and the hub cannot be reached; "
            "download the file on a machine with network access, and give its path"
        ) from exc
    except (HfHubHTTPError, OSError, ValueError) as exc:  # ValueError: not a valid name of a repository
        raise ModelError(f"{setting}: {spec} cannot be downloaded: {exc}") from exc
