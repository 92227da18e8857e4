"""Processes that tests fork instead of starting new interpreters look like new interpreters."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from tests.support.forked_scripts import fork_server, run_script

CHILD = "llamaq.worker.process.child_main"
SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path

def start(**options):
    pipe, given = os.pipe()
    command = [sys.executable, "-m", sys.argv[1], str(given), "token"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(given,),
        env={**os.environ, "GIVEN": "1"}, **options,
    )
    os.close(given)
    return child, pipe

child, pipe = start(start_new_session=True)
folder = Path(f"/proc/{child.pid}")
while sys.argv[1] not in (command := (folder / "cmdline").read_text().strip(chr(0)).split(chr(0))):
    time.sleep(0.01)
seen = {
    "command": command,
    "is_own_child": int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid(),
    "has_own_session": os.getsid(child.pid) == child.pid,
    "folder": os.readlink(folder / "cwd"),
    "is_forked": "GIVEN=1" not in (folder / "environ").read_text(),
    "has_the_pipe": os.readlink(folder / "fd" / command[-2]) == os.readlink(f"/proc/self/fd/{pipe}"),
}
_, errors = child.communicate(b"no settings\\n")
seen |= {"code": child.returncode, "errors": errors.decode(), "rest_of_pipe": os.read(pipe, 1).decode()}
killed, _ = start()
seen["has_the_same_session"] = os.getsid(killed.pid) == os.getsid(0)
killed.kill()
print(json.dumps(seen | {"killed": killed.wait()}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a forked script sees of its children."""
    folder = tmp_path_factory.mktemp("forked")
    (folder / "script.py").write_text(SCRIPT)
    done = run_script([str(folder / "script.py"), CHILD], cwd=folder, variables=dict(os.environ), timeout_s=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"expected_folder": str(folder)}


def test_a_forked_child_looks_like_a_new_interpreter(seen: dict[str, Any]) -> None:
    assert seen["command"][:3] == [sys.executable, "-m", CHILD]
    assert seen["command"][4:] == ["token"]
    assert seen["folder"] == seen["expected_folder"]
    assert seen["is_own_child"]
    assert seen["has_own_session"]
    assert seen["has_the_same_session"]
    assert seen["is_forked"] is (fork_server() is not None)


def test_a_forked_child_gets_its_files_and_its_parent_its_exit_codes(seen: dict[str, Any]) -> None:
    assert seen["has_the_pipe"]
    assert seen["rest_of_pipe"] == "", "the end of the child closes the pipe"
    assert "Invalid JSON" in seen["errors"]
    assert (seen["code"], seen["killed"]) == (1, -9)
