"""Runs llama.cpp's own server tests against `llamaq serve`, and compares the outcomes with those of llama-server.

    make conformance                       # about 5 minutes
    make conformance TESTS=test_basic.py
    make conformance SERVER=llama-server   # against llama-server itself: writes llama_server.json

The tests are in the source distribution of llama-cpp-python. They are unpacked outside the repository. Exits with 1 if
a test fails that passes against llama-server and that `left_out.toml` does not name, or if one passes that it names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.llama_server_run import LlamaServerRun
from tests.conformance.outcomes import (
    Outcome,
    compare,
    print_comparison,
    print_outcomes,
    read_left_out,
    read_not_run,
    read_outcomes,
)
from tests.conformance.stack_host import StackHost
from tests.conformance.stand_in_models import StandInModels
from tests.support.ports import reserve_port

from llamaq.worker.local.embedded_redis import EmbeddedRedis

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build"
LEFT_OUT = HERE / "left_out.toml"
LLAMA_SERVER = HERE / "llama_server.json"
TESTS = Path("vendor/llama.cpp/tools/server/tests")
POLL_S = 0.2
TEST_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class Suite:
    """llama.cpp's tests, in a process of their own.

    Args:
        python: The python of an environment with the packages that the tests need.
        folder: The folder of the tests.
        arguments: Which of them, as arguments of pytest. Empty: all.
        scratch: A folder for files of this run.
        name: The name of the log and of the file with the outcomes in `build`.
    """

    python: Path
    folder: Path
    arguments: Sequence[str]
    scratch: Path
    name: str

    @property
    def is_whole(self) -> bool:
        """Whether all tests run."""
        return not self.arguments

    def run(self, shim: Path, variables: Mapping[str, str], poll: Callable[[], None] | None = None) -> list[Outcome]:
        """Run the tests, and return their outcomes.

        Args:
            shim: The program that the tests start in place of llama-server, a Python file without imports of packages.
            variables: Its environment variables.
            poll: Called again and again while the tests run.
        """
        executable = self.scratch / "llama-server"
        executable.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{shim}" "$@"\n')
        executable.chmod(0o755)
        outcomes = self.scratch / "outcomes.jsonl"
        outcomes.touch()
        common = {
            "LLAMA_SERVER_BIN_PATH": str(executable),
            "LLAMAQ_CONFORMANCE_OUTCOMES": str(outcomes),
            "PORT": str(reserve_port()),
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(HERE)]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        BUILD.mkdir(exist_ok=True)
        with (BUILD / f"{self.name}.log").open("wb") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())  # the log of the stacks
            testing = subprocess.Popen(
                self._command(), cwd=self.folder, env={**os.environ, **common, **variables}, stdout=log, stderr=log
            )
            try:
                while poll is not None and testing.poll() is None:
                    poll()
                testing.wait()
            finally:
                testing.kill()
        shutil.copy(outcomes, BUILD / f"{self.name}.jsonl")
        return read_outcomes(outcomes)

    def _command(self) -> list[str]:
        chosen = [f"unit/{each}" for each in self.arguments]
        chosen = chosen or ["unit", *(f"--ignore=unit/{file}" for file in read_not_run(LEFT_OUT))]
        command = [str(self.python), "-m", "pytest", "-p", "pytest_plugin", "-p", "no:cacheprovider", "-m", "not slow"]
        return [*command, "-q", f"--timeout={TEST_TIMEOUT_S}", "--tb=short", "--show-capture=stdout", *chosen]


def main() -> int:
    """Run the tests, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="holds the unpacked source distribution, and `venv` for its tests")
    parser.add_argument("tests", nargs="*", help="arguments for pytest in place of all tests, such as test_basic.py")
    parser.add_argument("--server", type=Path, help="a llama-server to run the tests against, not `llamaq serve`")
    given = parser.parse_intermixed_args()
    source = next(given.folder.glob("llama_cpp_python-*/"))
    name = "conformance-llama-server" if given.server else "conformance"
    with tempfile.TemporaryDirectory(prefix="llamaq-conformance-") as scratch:
        tempfile.tempdir = scratch  # for the files that the stacks write
        python = given.folder / "venv" / "bin" / "python"
        suite = Suite(python, source / TESTS, given.tests, Path(scratch), name)
        return run_llamaq(suite) if given.server is None else run_llama_server(suite, given.server)


def run_llama_server(suite: Suite, server: Path) -> int:
    """Run the tests against llama-server, and note what it did if all tests ran. Returns the exit code."""
    chosen = {"server": str(server), "models": StandInModels.write(suite.scratch).to_json()}
    outcomes = suite.run(HERE / "llama_server_shim.py", {"LLAMAQ_CONFORMANCE_SERVER": json.dumps(chosen)})
    print_outcomes(outcomes)
    if suite.is_whole:
        LlamaServerRun.of(outcomes).write(LLAMA_SERVER)
    return 0


def run_llamaq(suite: Suite) -> int:
    """Run the tests against `llamaq serve`, while this process starts the servers that they want.

    Returns the exit code.
    """
    expected, left_out = LlamaServerRun.read(LLAMA_SERVER), read_left_out(LEFT_OUT)
    counts, address = suite.scratch / "token_counts.json", suite.scratch / "host.sock"
    counts.write_text(json.dumps(expected.token_counts))
    variables = {"LLAMAQ_CONFORMANCE_SOCKET": str(address), "LLAMAQ_CONFORMANCE_COUNTS": str(counts)}
    with EmbeddedRedis() as redis:
        host = StackHost(address, redis.url, StandInModels.write(suite.scratch))
        with closing(host):
            outcomes = suite.run(HERE / "llamaq_shim.py", variables, lambda: host.poll(POLL_S))
    unexpected = compare(outcomes, left_out, expected.passed, is_whole=suite.is_whole)
    print_outcomes(outcomes)
    print_comparison(outcomes, left_out, expected.passed, unexpected)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
