"""`llamaq.common` exports what users import, and its import is light."""

from __future__ import annotations

import subprocess
import sys

import pytest

import llamaq.common


def test_every_exported_name_exists() -> None:
    assert sorted(llamaq.common.__all__) == llamaq.common.__all__
    for name in llamaq.common.__all__:
        assert hasattr(llamaq.common, name)


@pytest.mark.starts_processes
def test_the_import_loads_neither_redis_nor_llama_cpp_nor_numpy() -> None:
    code = "import sys, llamaq.common; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"redis", "llama_cpp", "numpy", "msgpack"} & set(loaded)
