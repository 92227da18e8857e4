"""The import contracts of pyproject.toml hold, and each contract can fail. Light modules load no heavy dependency."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PORTIONS = ("common", "producer", "worker", "tools")
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
DECIDING = ("core", "scheduling", "kv_cache")
"""Packages of the worker that only decide: they use no I/O and no engine."""


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `lint-imports` in a folder that has the four portions and a pyproject.toml."""
    return subprocess.run(
        [LINT_IMPORTS, "--no-logo", "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": ":".join(str(folder / portion) for portion in PORTIONS), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def contract_names() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]]


BREACHES = {
    "Portions: special commands are above the command line and the gateway, then producer and worker, then common": (
        "common/llamaq/common/errors.py",
        "import llamaq.worker.settings",
    ),
    "The packages of the worker import downwards only": (
        "worker/llamaq/worker/scheduling/preemption.py",
        "import llamaq.worker.engine.engine",
    ),
    "The packages of common import downwards only": (
        "common/llamaq/common/errors.py",
        "import llamaq.common.protocol.keys",
    ),
    "The packages of the producer import downwards only": (
        "producer/llamaq/producer/streaming/subscriber.py",
        "import llamaq.producer.client",
    ),
    "No circles, neither between packages nor between the modules of one package": (
        "worker/llamaq/worker/core/slot.py",
        "import llamaq.worker.core.batch",
    ),
    "The deciding packages are pure: no Redis, no llama.cpp, no numpy, no threads, no files": (
        "worker/llamaq/worker/scheduling/scheduler.py",
        "import redis",
    ),
    "What runs in the engine thread knows no Redis and no event loop": (
        "worker/llamaq/worker/generation/sampling/logit_sampler.py",
        "import asyncio",
    ),
    "llamaq top: what the view shows is decided without Redis and without a screen": (
        "producer/llamaq/cli/top/summarize_reading.py",
        "import redis",
    ),
    "Only the screen of llamaq top imports textual": ("producer/llamaq/cli/top/command.py", "import textual"),
    "Only the codec imports msgpack": ("producer/llamaq/producer/job_handle.py", "import msgpack"),
    "Few modules import llama.cpp": ("worker/llamaq/worker/engine/engine.py", "import llama_cpp"),
    "Only the grammar package imports llguidance": (
        "worker/llamaq/worker/generation/sampling/logit_sampler.py",
        "import llguidance",
    ),
    "One module imports prometheus_client, and one OpenTelemetry": (
        "producer/llamaq/producer/submission.py",
        "import opentelemetry.trace",
    ),
    "Nothing in the wheel imports the tools": ("producer/llamaq/cli/main.py", "import llamaq.tools.random_gguf"),
}
"""Maps each contract to a module, and to an import that would break the contract in this module."""


@pytest.fixture(scope="module")
def copied_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of every Python file of the four portions, and of pyproject.toml."""
    folder = tmp_path_factory.mktemp("sources")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path in (path for portion in PORTIONS for path in (ROOT / portion / "llamaq").rglob("*.py")):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return folder


def test_every_contract_has_an_import_that_breaks_it() -> None:
    assert set(contract_names()) == set(BREACHES)


def test_all_import_contracts_hold(copied_sources: Path) -> None:
    done = lint_imports(copied_sources)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Contracts: {len(BREACHES)} kept, 0 broken." in done.stdout


@pytest.mark.parametrize("contract", BREACHES)
def test_an_import_that_breaks_a_contract_is_found_also_inside_a_function(copied_sources: Path, contract: str) -> None:
    file, statement = BREACHES[contract]
    path = copied_sources / file
    source = path.read_text()
    path.write_text(f"{source}\n\ndef _breach() -> None:\n    {statement}\n")
    try:
        done = lint_imports(copied_sources)
    finally:
        path.write_text(source)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in " ".join(done.stdout.split())


def loaded_by(*modules: str) -> set[str]:
    """Return all modules that a new interpreter has loaded after it has imported the given modules."""
    paths = [str(ROOT / portion) for portion in PORTIONS]
    code = f"import sys; sys.path[:0] = {paths!r}; import {', '.join(modules)}; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def deciding_modules() -> set[str]:
    """Return the dotted names of all modules of the packages that decide."""
    names = set()
    for package in DECIDING:
        for path in (ROOT / "worker" / "llamaq" / "worker" / package).rglob("*.py"):
            parts = path.relative_to(ROOT / "worker").with_suffix("").parts
            names.add(".".join(parts).removesuffix(".__init__"))
    return names


def test_the_packages_that_decide_load_neither_redis_nor_llama_cpp_nor_numpy() -> None:
    modules = deciding_modules()
    assert {f"llamaq.worker.{package}" for package in DECIDING} <= modules
    loaded = loaded_by(*modules)
    assert modules <= loaded
    assert not loaded & {"redis", "llama_cpp", "numpy", "msgpack"}


def test_a_web_backend_loads_no_llama_cpp_and_no_worker() -> None:
    loaded = loaded_by("llamaq.producer", "llamaq.gateway.app", "llamaq.cli.main")
    assert not loaded & {"llama_cpp", "numpy"}
    assert not {name for name in loaded if name.startswith("llamaq.worker")}


def test_the_fake_engine_needs_no_llama_cpp_and_no_redis() -> None:
    assert not loaded_by("llamaq.worker.testing") & {"llama_cpp", "redis"}


def test_no_portion_hides_the_others() -> None:
    assert [portion for portion in PORTIONS if (ROOT / portion / "llamaq" / "__init__.py").exists()] == []
