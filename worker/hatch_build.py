"""The build hook that compiles the C++ modules of the worker: see `worker/pyproject.toml`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULES = ["llamaq/worker/generation/sampling/native_row_draws.cpp"]
# Without fused operations, sums of doubles are the same as in Python.
OPTIONS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra"]


def compile_module(source: Path, folder: Path) -> Path:
    """Compile a C++ file to a Python module of the same name in a folder, with the compiler of the environment variable
    CXX or that of Python. Returns the module's path.
    """
    module = folder / f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}"
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run([*compiler, *OPTIONS, include, str(source), "-o", str(module)], check=True)
    return module


class CompileModules(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled modules to the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile the modules; called by hatchling before it builds the wheel."""
        self._folder = TemporaryDirectory(prefix="llamaq-modules-")  # hatchling reads it after this call
        for name in MODULES:
            module = compile_module(Path(self.root, name), Path(self._folder.name))
            build_data["force_include"][str(module)] = str(Path(name).with_name(module.name))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the temporary files; called by hatchling after it has built the wheel."""
        self._folder.cleanup()
