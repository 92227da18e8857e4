"""What llama.cpp logs when a worker starts."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from llamaq.worker.engine.llama_bindings import Context, Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions

LOCK_IN_VAIN = """
import logging, os, resource, sys
from pathlib import Path
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ModelOptions

logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
model = Path(f"/proc/self/fd/{os.open(sys.argv[1], os.O_RDONLY)}")  # its folder may be closed to other users
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
if os.geteuid() == 0:  # root may lock any amount of memory
    os.setuid(65534)
Model(model, ModelOptions(n_gpu_layers=0, use_mlock=True)).close()
"""


def test_the_shipped_model_starts_without_a_warning_of_llama_cpp(
    demo_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    model = Model(demo_model, ModelOptions(n_gpu_layers=0))
    assert model.n_ctx_train < 8192  # the default of n_ctx, which several jobs share
    options = ContextOptions(n_ctx=8192, n_batch=64, n_ubatch=64, n_seq_max=4, n_threads=1, n_threads_batch=1)
    Context(model, options).close()
    model.close()
    assert len(caplog.records) > 10
    assert [record.message for record in caplog.records if record.levelno > logging.DEBUG] == []


@pytest.mark.starts_processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_model_that_cannot_be_locked_in_memory_is_a_warning(demo_model: Path) -> None:
    command = [sys.executable, "-c", LOCK_IN_VAIN, str(demo_model)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    lines = [line for line in process.stderr.splitlines() if "mlock" in line.lower() or "memlock" in line.lower()]
    assert lines, process.stderr
    assert {line.partition(" ")[0] for line in lines} == {"WARNING"}, lines
