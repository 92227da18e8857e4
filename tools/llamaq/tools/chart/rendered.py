"""The rendered manifests in the repository, which tests read without Helm, and the chart that they come from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[4]
CHART = ROOT / "deploy" / "helm" / "llamaq"
RENDERED = ROOT / "deploy" / "helm" / "rendered"


def values_files() -> list[Path]:
    """Return the values with which the chart is rendered."""
    return sorted((CHART / "ci").glob("*.yaml"))


def digest() -> str:
    """Return the digest of all files of the chart."""
    files = sorted(path for path in CHART.rglob("*") if path.is_file())
    content = b"".join(str(path.relative_to(CHART)).encode() + b"\0" + path.read_bytes() + b"\0" for path in files)
    return hashlib.sha256(content).hexdigest()


def header(values: Path) -> str:
    """Return the first line of the rendered manifests of these values."""
    return f"# Rendered by `make check-chart` from deploy/helm/llamaq, sha256 {digest()}, with ci/{values.name}\n"


def manifests(text: str) -> list[dict[str, Any]]:
    """Return the manifests in a YAML file."""
    return [document for document in yaml.safe_load_all(text) if document]
