"""`llamaq.producer` is light to import: a web backend needs neither llama.cpp nor numpy nor the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

import llamaq.producer


def test_every_exported_name_exists() -> None:
    assert sorted(llamaq.producer.__all__) == llamaq.producer.__all__
    for name in llamaq.producer.__all__:
        assert hasattr(llamaq.producer, name)


@pytest.mark.starts_processes
def test_the_import_loads_no_llama_cpp_no_numpy_no_worker_and_no_command_line() -> None:
    code = "import sys, llamaq.producer; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"llama_cpp", "numpy", "jinja2", "typer", "rich", "llamaq.worker", "llamaq.cli", "fastapi"} & set(loaded)
    assert len(loaded) < 1000
