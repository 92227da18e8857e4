"""Builds the wheels and source distributions of this checkout without the network."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKER, SERVE = ROOT / "worker", ROOT / "producer"
"""Folders of the distributions `llamaq-worker` and `llamaq-serve`. `llamaq` is built from the root of the checkout."""
BASE_PORTIONS = ("common", "producer")
"""Folders of the distribution `llamaq`. What begins with `GATEWAY` in them belongs to `llamaq-serve`."""
GATEWAY = "llamaq/gateway"


def hatchling_build(source: Path, target: str, directory: Path) -> Path:
    """Build a wheel or sdist of `source` and return its path."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = directory.iterdir()
    return built


def names_in(wheel: Path) -> set[str]:
    """Return the names of the files in a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
