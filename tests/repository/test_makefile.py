"""The Makefile and the CI: the targets, the folder of built wheels, and errors that name what is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run make in the checkout. If make runs these tests, the variables of that outer make are not passed on."""
    inherited = {"CMAKE_ARGS", "LLAMAQ_WHEEL_CACHE", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON"}
    return subprocess.run(
        ["make", "--no-print-directory", *args],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in inherited} | (env or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def wheel_dir(**env: str) -> str:
    """Return the folder in which make stores the built wheel of llama-cpp-python."""
    database = make("--print-data-base", "--question", "help", env=env).stdout
    found = re.search(r"^WHEEL_DIR := (.*)$", database, re.MULTILINE)
    assert found
    return found[1]


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test$", script.read_text(), re.MULTILINE)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)


def test_make_help_lists_every_target_that_is_not_a_file() -> None:
    phony = {
        name
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith(".PHONY:")
        for name in line.split()[1:]
    }
    listed = set(re.findall(r"^  make ([a-z-]+)", make("help").stdout, re.MULTILINE))
    assert listed == phony
    assert {"demo", "test", "venv", "lint", "types", "bench", "bench-quick", "clean", "help"} <= listed


@pytest.mark.parametrize("target", ["demo", "test", "bench", "bench-quick", "clean"])
def test_the_recipe_of_each_target_expands(target: str) -> None:
    done = make("--dry-run", target)
    assert done.returncode == 0, done.stderr


def test_built_wheels_are_stored_outside_the_checkout_in_one_folder_per_cmake_arguments(tmp_path: Path) -> None:
    plain, again = wheel_dir(), wheel_dir()
    assert plain == again
    assert wheel_dir(CMAKE_ARGS="-DGGML_CUDA=ON") != plain
    assert ROOT not in Path(plain).parents
    assert Path(wheel_dir(LLAMAQ_WHEEL_CACHE=str(tmp_path))).parent == tmp_path


def test_without_a_compiler_make_names_the_packages_to_install(tmp_path: Path) -> None:
    done = make(
        f"BIN={Path(sys.executable).parent}",
        f"LLAMAQ_WHEEL_CACHE={tmp_path}",
        f"WHEEL={tmp_path}/wheel",
        f"{tmp_path}/wheel",
        env={"CC": "no-such-compiler"},
    )
    assert done.returncode != 0
    assert "no-such-compiler" in done.stderr
    assert "apt-get install build-essential" in done.stderr


def test_without_a_new_enough_python_make_names_the_required_version(tmp_path: Path) -> None:
    done = make("PYTHON=/bin/false", f"VENV={tmp_path}/venv", f"{tmp_path}/venv/bin/python")
    assert done.returncode != 0
    assert "python >= 3.11" in done.stderr
