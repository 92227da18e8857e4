"""`make test` runs mypy beside pytest: it fails if one of them fails, and shows mypy's report after that of pytest."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("pytest_code", "mypy_code", "expected"), [(0, 0, 0), (0, 1, 2), (1, 0, 2)], ids=["both pass", "mypy", "pytest"]
)
def test_make_test_fails_if_mypy_or_pytest_fails(
    tmp_path: Path, pytest_code: int, mypy_code: int, expected: int
) -> None:
    codes = {"ruff": 0, "lint-imports": 0, "mypy": mypy_code, "pytest": pytest_code}
    (tmp_path / "bin").mkdir()
    for name, code in codes.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} has run"\nexit {code}\n')
        program.chmod(0o755)
    stamp = tmp_path / "dev.stamp"  # make must not install anything
    stamp.touch()
    done = subprocess.run(
        ["make", "--no-print-directory", f"--old-file={stamp}", f"VENV={tmp_path}", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.endswith("has run")]
    assert lines == ["ruff has run", "ruff has run", "lint-imports has run", "pytest has run", "mypy has run"]
