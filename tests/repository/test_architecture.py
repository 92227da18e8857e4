"""Who imports whom: the rooms stay apart, and each outside thing has its gates."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PORTIONS = ("common", "producer", "worker", "tools")


def sources(*portions: str) -> dict[str, Path]:
    """Every module of these portions, by its dotted name."""
    found = {}
    for portion in portions:
        for path in (ROOT / portion / "llamaq").rglob("*.py"):
            name = ".".join(path.relative_to(ROOT / portion).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    assert found
    return found


def imports_of(path: Path) -> set[str]:
    """What the file imports at run time, also inside functions: the dotted names of modules."""
    return set(_imports_in(ast.parse(path.read_text())))


def _imports_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from _imports_in(node)


def imports_any(path: Path, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imports_of(path) for package in packages)


def who_imports(package: str, *portions: str) -> set[str]:
    return {name for name, path in sources(*portions).items() if imports_any(path, package)}


def loaded_by(*modules: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after importing these."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules, sep='\\n')"
    paths = [str(ROOT / portion) for portion in PORTIONS]
    code = f"import sys; sys.path[:0] = {paths!r}; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


DECIDING = ("core", "scheduling", "kv_cache")


def test_the_packages_that_decide_load_neither_redis_nor_llama_cpp_nor_numpy() -> None:
    modules = [name for name in sources("worker") if name.split(".")[2:3] and name.split(".")[2] in DECIDING]
    assert {name.split(".")[2] for name in modules} == set(DECIDING)
    loaded = loaded_by(*modules)
    assert set(modules) <= loaded
    assert not loaded & {"redis", "llama_cpp", "numpy", "msgpack"}


def test_a_web_backend_loads_no_llama_cpp_and_no_worker() -> None:
    loaded = loaded_by("llamaq.producer", "llamaq.cli.main")
    assert not loaded & {"llama_cpp", "numpy"}
    assert not {name for name in loaded if name.startswith("llamaq.worker")}


def test_the_fake_engine_needs_no_llama_cpp_and_no_redis() -> None:
    assert not loaded_by("llamaq.worker.testing") & {"llama_cpp", "redis"}


def test_no_portion_hides_the_others() -> None:
    assert [portion for portion in PORTIONS if (ROOT / portion / "llamaq" / "__init__.py").exists()] == []


def test_only_the_codec_imports_msgpack() -> None:
    assert who_imports("msgpack", *PORTIONS) == {"llamaq.common.protocol.codec"}


def test_llama_cpp_has_few_gates() -> None:
    assert who_imports("llama_cpp", "common", "producer", "worker") == {
        "llamaq.common.vocab.vocab",
        "llamaq.worker.engine.abi_check",
        "llamaq.worker.engine.llama_bindings",
        "llamaq.worker.generation.grammar.compiled_grammar",
        "llamaq.worker.generation.grammar.sandbox_process",
    }


def test_the_engine_thread_does_not_import_redis() -> None:
    modules = {
        name: path
        for name, path in sources("worker").items()
        if name.startswith(("llamaq.worker.engine.", "llamaq.worker.generation."))
    }
    assert {"llamaq.worker.engine.engine", "llamaq.worker.generation.sampler"} <= modules.keys()
    assert not [name for name, path in modules.items() if imports_any(path, "redis", "asyncio")]


def test_nothing_in_the_wheel_imports_the_tools() -> None:
    assert who_imports("llamaq.tools", "common", "producer", "worker") == set()


def test_the_walk_sees_imports_inside_functions_but_not_those_for_type_checkers(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import numpy\n"
        "def function():\n    from redis import asyncio\n    import os.path\n"
    )
    assert imports_of(path) == {"typing", "typing.TYPE_CHECKING", "redis", "redis.asyncio", "os.path"}
