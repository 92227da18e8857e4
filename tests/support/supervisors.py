"""Supervisors of several workers, and the states of their child processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.forked_children import HELPER_COMMAND

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Command, Environment

PROMPT = "Once upon a time"
SUPERVISE = """
import sys
from llamaq.common.logging_setup import configure_logging
from llamaq.worker.settings import load_settings
from llamaq.worker.process.supervisor import Supervisor

configure_logging("info")
sys.exit(Supervisor([load_settings() for _ in range(int(sys.argv[1]))]).run())
"""
"""Runs a supervisor of several workers on the CPU. With `--devices`, each worker would need a GPU."""


def supervise(environment: Environment, n_children: int, **variables: str) -> Command:
    """Start a supervisor of `n_children` workers, and wait until the workers are ready."""
    supervisor = start_supervisor(environment, n_children, **environment.worker_variables(**variables))
    supervisor.await_output("worker.ready", n_children)
    return supervisor


def start_supervisor(environment: Environment, n_children: int, **variables: str) -> Command:
    script = environment.folder / "supervise.py"
    script.write_text(SUPERVISE)
    return environment.start_script(script, str(n_children), **variables)


def children_of(pid: int) -> dict[int, str]:
    """Return the state of each child of a process, by its id. Zombies are included, but no fork helpers."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
            is_helper = bool(fields) and (entry / "cmdline").read_bytes().startswith(HELPER_COMMAND.encode())
        except OSError:
            continue
        if fields and int(fields[1]) == pid and not is_helper:
            found[int(entry.name)] = fields[0]
    return found
