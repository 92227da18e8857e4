"""`tests/support/ports.py`: no two test processes have the same port, and none that another program uses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.support import ports
from tests.support.ports import HOST, reserve_port, reserve_ports

RESERVE = """
import json, sys
from tests.support.ports import reserve_ports
print(json.dumps(reserve_ports(400)), flush=True)
sys.stdin.read()
"""


@pytest.mark.starts_processes
def test_two_processes_have_no_port_in_common(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        return subprocess.Popen(
            [sys.executable, "-c", RESERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    with start() as one, start() as other:
        assert one.stdout is not None
        assert other.stdout is not None
        found = [*json.loads(one.stdout.readline()), *json.loads(other.stdout.readline())]
        one.communicate()
        other.communicate()
    # Two random choices of 400 ports have no port in common once in ten million runs.
    assert len(set(found)) == len(found) == 800


def test_a_port_is_reserved_once_and_not_while_another_program_listens_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = reserve_port()
    monkeypatch.setattr(ports, "FIRST", port)
    monkeypatch.setattr(ports, "END", port + 1)
    with pytest.raises(RuntimeError, match="all ports"):
        reserve_ports(1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no-locks"))
    (tmp_path / "no-locks").mkdir()
    with socket.socket() as server:
        server.bind((HOST, port))
        server.listen()
        with pytest.raises(RuntimeError, match="all ports"):
            reserve_ports(1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert reserve_ports(1) == [port]
