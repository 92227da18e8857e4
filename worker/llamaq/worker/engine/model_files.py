"""From what the user calls a model to a file on disk."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from llamaq.common.errors import MissingExtra, ModelError

_HUB = re.compile(r"^hf:(?P<repo>[\w.\-]+/[\w.\-]+)/(?P<file>[\w.\-/]+\.gguf)$")


def demo_model_path() -> Path:
    """The small model that ships with the package; see MODEL_CARD.md beside it."""
    return Path(str(files("llamaq.worker").joinpath("model", "llamaq-demo.gguf")))


def resolve_model_file(spec: str | None) -> Path:
    """The file of a model: a path, `hf:OWNER/REPO/FILE.gguf`, or the demo model for None; raises `ModelError`."""
    if spec is None:
        return demo_model_path()
    if spec.startswith("hf:"):
        return _fetch(spec)
    path = Path(spec).expanduser()
    if not path.is_file():
        raise ModelError(f"--model: there is no file {spec!r} (one of the Hugging Face hub is hf:OWNER/REPO/FILE.gguf)")
    return path


def _fetch(spec: str) -> Path:
    match = _HUB.fullmatch(spec)
    if match is None:
        raise ModelError(f"--model: {spec!r} is not of the form hf:OWNER/REPO/FILE.gguf")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as exc:
        raise MissingExtra("--model hf:…", "hub") from exc
    try:
        return Path(hf_hub_download(match["repo"], match["file"]))
    except LocalEntryNotFoundError as exc:
        raise ModelError(
            f"--model: {spec} is not in the local cache and the hub cannot be reached; "
            "download the file where there is a network and give its path"
        ) from exc
    except (HfHubHTTPError, OSError, ValueError) as exc:  # ValueError: a name that no repository can have
        raise ModelError(f"--model: {spec} cannot be fetched: {exc}") from exc
