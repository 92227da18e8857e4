"""The CMake arguments with which make builds llama.cpp."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTY_HEADER = '__asm__ volatile ("ldtilecfg" :: "m" (*((const void **)__config)));'  # GCC bug 114098
MENDED_HEADER = "__builtin_ia32_ldtilecfg (__config);"


@pytest.mark.parametrize(
    ("macros", "header", "is_without_amx"),
    [
        ("#define __AMX_INT8__ 1", FAULTY_HEADER, True),
        ("#define __AMX_INT8__ 1", MENDED_HEADER, False),
        ("#define __AVX2__ 1", FAULTY_HEADER, False),
    ],
    ids=["AMX and a faulty header", "AMX and a mended header", "no AMX"],
)
def test_llama_cpp_is_built_without_amx_if_the_compiler_breaks_it(
    tmp_path: Path, macros: str, header: str, is_without_amx: bool
) -> None:
    (tmp_path / "amxtileintrin.h").write_text(header)
    compiler = tmp_path / "cc"
    compiler.write_text(
        f"#!/bin/sh\ncase $1 in\n  -print-file-name=include) echo '{tmp_path}';;\n  *) echo '{macros}';;\nesac\n"
    )
    compiler.chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", '--eval=show: ; @echo "$$LLAMA_CMAKE_ARGS"', f"CC={compiler}", "show"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "-DGGML_NATIVE=ON" in done.stdout
    assert ("-DCMAKE_CXX_FLAGS=-mno-amx-int8" in done.stdout) is is_without_amx
