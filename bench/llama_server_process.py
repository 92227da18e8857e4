"""Processes of llama-server: of the `xllamacpp` wheel, or of a program that was built from llama.cpp's sources.

The wheel computes on CPUs only. For a GPU, llama-server is built from the sources that llama-cpp-python contains, with
the worker's options of CMake, so that both systems use the same version of llama.cpp.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import START_TIMEOUT_S
from llamaq.common.errors import LlamaqError
from llamaq.worker.settings import WorkerSettings
from server_process import HOST, ServerProcess, free_port, start_process

PEER_VARIABLE = "LLAMAQ_BENCH_PEER"
"""Environment variable with the path of a program `llama-server`, or of a python that has xllamacpp. `make bench-peers`
installs such a python and sets the variable."""
PROGRAM = "llama-server"
N_HTTP_THREADS = 64
"""One thread for each request, so that no request waits for another."""

Started = tuple[str, dict[str, Any]]
"""The address of a server, and its version and settings."""


@contextmanager
def run_llama_server(peer: str, settings: WorkerSettings) -> Iterator[Started]:
    """Run llama-server with the settings of a worker until the end of the context.

    Raises:
        LlamaqError: `peer`, the value of `LLAMAQ_BENCH_PEER`, cannot be started.
    """
    run = _run_program if Path(peer).name == PROGRAM else _run_wheel
    with tempfile.TemporaryDirectory() as slot_folder, run(peer, settings, slot_folder) as started:
        yield started


@contextmanager
def _run_program(program: str, settings: WorkerSettings, slot_folder: str) -> Iterator[Started]:
    port, options = free_port(), _program_options(settings)
    settings_of_run = {"model": settings.model, "slot-save-path": slot_folder, "host": HOST, "port": port}
    command = [program, "--kv-unified"]
    for name, value in {**settings_of_run, **options}.items():
        command += [f"--{name}", str(value)]
    with _running(command, stdin=subprocess.DEVNULL) as server:
        server.await_answer(port, "/health")
        yield f"http://{HOST}:{port}", {PROGRAM: _version(program), "kv-unified": True} | options


def _program_options(settings: WorkerSettings) -> dict[str, Any]:
    """Return the options that a worker with these settings has too."""
    return {
        "ctx-size": settings.n_ctx,
        "batch-size": settings.batch_budget,
        "ubatch-size": settings.ubatch_tokens,
        "parallel": settings.n_parallel,
        "threads": settings.n_threads_alone,
        "threads-batch": settings.n_threads_alone,
        "n-gpu-layers": settings.n_gpu_layers,
        "fit": "off",  # use ctx-size and n-gpu-layers as they are given
        "threads-http": N_HTTP_THREADS,
    }


def _version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, errors="replace", check=False)
    found = re.search(r"version: *(.+)", done.stdout + done.stderr)
    return found[1].strip() if found else "unknown"


@contextmanager
def _run_wheel(python: str, settings: WorkerSettings, slot_folder: str) -> Iterator[Started]:
    params = _wheel_params(settings, slot_folder)
    main = str(Path(__file__).with_name("llama_server_main.py"))
    with _running([python, main], stdin=subprocess.PIPE) as server:
        ready = _await_address(server, params)
        hidden = ("model.path", "slot_save_path", "verbosity")
        described = {"xllamacpp": ready["version"]} | {key: one for key, one in params.items() if key not in hidden}
        yield ready["address"], described


def _wheel_params(settings: WorkerSettings, slot_folder: str) -> dict[str, Any]:
    return {
        "model.path": settings.model,
        "n_ctx": settings.n_ctx,
        "n_batch": settings.batch_budget,
        "n_ubatch": settings.ubatch_tokens,
        "n_parallel": settings.n_parallel,
        "kv_unified": True,
        # defaults of llama-server
        "cache_prompt": True,
        "cache_ram_mib": 8192,
        "cache_idle_slots": True,
        "n_cache_reuse": 0,
        "slot_prompt_similarity": 0.1,
        "cont_batching": True,
        # settings of the worker
        "cpuparams.n_threads": settings.n_threads_alone,
        "cpuparams_batch.n_threads": settings.n_threads_alone,
        "n_gpu_layers": settings.n_gpu_layers,
        "fit_params": False,  # use n_ctx and n_gpu_layers as they are given
        "n_threads_http": N_HTTP_THREADS,
        "slot_save_path": slot_folder + os.sep,  # required to erase slots
        "verbosity": 1,
    }


def _await_address(server: ServerProcess, params: dict[str, Any]) -> dict[str, str]:
    """Send the parameters, and return the address and the version."""
    process = server.process
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("llama-server was started without pipes")
    process.stdin.write(json.dumps(params).encode() + b"\n")
    process.stdin.flush()
    readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline() if readable else b""
    if not line:
        raise server.start_error()
    ready: dict[str, str] = json.loads(line)
    return ready


@contextmanager
def _running(command: list[str], stdin: int) -> Iterator[ServerProcess]:
    try:
        started = start_process(PROGRAM, command, stdin)
    except OSError as exc:
        raise LlamaqError(f"{PEER_VARIABLE} names neither llama-server nor a python: {exc}") from exc
    with started as server:
        yield server
