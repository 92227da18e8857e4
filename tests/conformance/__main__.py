"""Runs llama.cpp's own server tests against `llamaq serve`, and compares the outcomes with `left_out.toml`.

    make conformance                     # about 10 minutes
    make conformance TESTS=test_basic.py

The tests are in the source distribution of llama-cpp-python. They are unpacked outside the repository. Exits with 1 if
a test fails that `left_out.toml` does not name, or if one passes that it names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conformance.generation_model import write_generation_model
from tests.conformance.outcomes import Outcome, compare, print_table, read_left_out, read_not_run, read_outcomes
from tests.conformance.stack_host import StackHost

from llamaq.worker.local.embedded_redis import EmbeddedRedis

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LEFT_OUT = HERE / "left_out.toml"
TESTS = Path("vendor/llama.cpp/tools/server/tests")
POLL_S = 0.2
TEST_TIMEOUT_S = 180


def main() -> int:
    """Run the tests, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="holds the unpacked source distribution, and `venv` for its tests")
    parser.add_argument("tests", nargs="*", help="arguments for pytest in place of all tests, such as test_basic.py")
    given = parser.parse_args()
    source = next(given.folder.glob("llama_cpp_python-*/"))
    with tempfile.TemporaryDirectory(prefix="llamaq-conformance-") as scratch:
        outcomes = run(given.folder / "venv" / "bin" / "python", source / TESTS, given.tests, Path(scratch))
    unexpected = compare(outcomes, read_left_out(LEFT_OUT), is_whole=not given.tests)
    print_table(outcomes, unexpected)
    return 1 if unexpected else 0


def run(python: Path, folder: Path, arguments: list[str], scratch: Path) -> list[Outcome]:
    """Run pytest in the folder of the tests while this process starts the servers that they want."""
    log = ROOT / "build" / "conformance.log"
    log.parent.mkdir(exist_ok=True)
    shim = scratch / "llama-server"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{HERE / "shim.py"}" "$@"\n')
    shim.chmod(0o755)
    tempfile.tempdir = str(scratch)  # for the files that the stacks write
    outcomes = scratch / "outcomes.jsonl"
    outcomes.touch()
    variables = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(shim),
        "LLAMAQ_CONFORMANCE_SOCKET": str(scratch / "host.sock"),
        "LLAMAQ_CONFORMANCE_OUTCOMES": str(outcomes),
        "PORT": str(_free_port()),
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    chosen = [f"unit/{each}" for each in arguments]
    chosen = chosen or ["unit", *(f"--ignore=unit/{file}" for file in read_not_run(LEFT_OUT))]
    command = [str(python), "-m", "pytest", "-p", "pytest_plugin", "-p", "no:cacheprovider", "-m", "not slow", "-q"]
    command += [f"--timeout={TEST_TIMEOUT_S}", "--tb=short", "--show-capture=stdout", *chosen]
    with log.open("wb") as output, EmbeddedRedis() as redis:
        host = StackHost(scratch / "host.sock", redis.url, write_generation_model(scratch / "model.gguf"))
        os.dup2(output.fileno(), sys.stderr.fileno())  # the log of the stacks
        testing = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output)
        try:
            while testing.poll() is None:
                host.poll(POLL_S)
        finally:
            testing.kill()
            host.close()
    shutil.copy(outcomes, ROOT / "build" / "conformance.jsonl")
    return read_outcomes(outcomes)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
