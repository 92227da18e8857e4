"""The public API has the types that a user's type checker expects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tests/repository/typing/backend.py"


def test_the_public_api_is_typed_as_a_backend_uses_it(tmp_path: Path) -> None:
    """The example passes mypy in strict mode, without the settings of this project."""
    config = tmp_path / "mypy.ini"
    paths = ":".join(str(ROOT / portion) for portion in ("common", "producer"))
    config.write_text(
        "[mypy]\nstrict = True\nwarn_unused_ignores = True\nnamespace_packages = True\nexplicit_package_bases = True\n"
        f"mypy_path = {paths}\n"
        "[mypy-llama_cpp.*]\nignore_missing_imports = True\nfollow_imports = skip\n"
    )
    cache = ROOT / ".mypy_cache" / "backend"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", cache, EXAMPLE],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_portion_has_a_py_typed_marker() -> None:
    for folder in ("common/llamaq/common", "producer/llamaq/producer", "producer/llamaq/cli", "worker/llamaq/worker"):
        assert (ROOT / folder / "py.typed").is_file()
