"""The services of systemd fit the settings and the stop of the processes that they start."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamaq.gateway.settings import ServeSettings
from llamaq.worker.process.exit_codes import EXIT_FORCED
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings, load_settings

ROOT = Path(__file__).resolve().parents[2]


SERVICES = ["llamaq-worker", "llamaq-server"]
"""The services of systemd."""


def service_of_systemd(name: str) -> dict[str, str]:
    """Return the settings of a service, each of which its file has once."""
    text = (ROOT / f"deploy/systemd/{name}.service").read_text()
    settings = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    assert len(dict(settings)) == len(settings)
    return dict(settings)


def test_systemd_waits_longer_than_a_worker_and_a_server_need_to_stop() -> None:
    worker, server = (service_of_systemd(name) for name in SERVICES)
    drain_s = WorkerSettings.model_fields["drain_s"].default
    assert int(worker["TimeoutStopSec"]) > drain_s + Supervisor.AFTER_DRAIN_S
    assert worker["KillMode"] == "mixed", "SIGTERM reaches the supervisor alone"
    assert int(server["TimeoutStopSec"]) > ServeSettings.model_fields["shutdown_s"].default


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("deploy/systemd/llamaq-worker.service", "then up to {:g} s to requeue its jobs"),
        ("docker-compose.yml", "then up to {:g} s to requeue its jobs"),
        ("docs/kubernetes.md", "the worker needs up to {:g} seconds after the drain"),
        ("docs/operations.md", "A stop takes up to `--drain-s` plus {:g} seconds"),
    ],
)
def test_the_time_that_a_worker_needs_after_the_drain_is_documented(path: str, sentence: str) -> None:
    text = " ".join((ROOT / path).read_text().split())
    assert sentence.format(Supervisor.AFTER_DRAIN_S) in text


def test_systemd_leaves_it_to_the_supervisor_to_restart_a_worker_that_the_kernel_killed_for_memory() -> None:
    worker = service_of_systemd("llamaq-worker")
    assert worker["OOMPolicy"] == "continue", "the default stops the workers of all devices"


def test_a_service_that_a_second_signal_has_ended_has_not_failed() -> None:
    assert service_of_systemd("llamaq-worker")["SuccessExitStatus"] == str(EXIT_FORCED)


def test_a_service_may_lock_its_model_in_memory() -> None:
    assert "use_mlock" in WorkerSettings.model_fields
    assert service_of_systemd("llamaq-worker")["LimitMEMLOCK"] == "infinity"


def test_root_creates_the_devices_of_cuda_before_a_service_that_may_not_do_it() -> None:
    worker = service_of_systemd("llamaq-worker")
    assert worker["NoNewPrivileges"] == "yes"
    commands = worker["ExecStartPre"].split(" ; ")
    assert [command.split()[0] for command in commands] == ["+-/usr/bin/nvidia-smi", "+-/usr/bin/nvidia-modprobe"]
    assert "-u" in commands[1].split(), "the device nvidia-uvm"


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_services(name: str, tmp_path: Path) -> None:
    text = (ROOT / f"deploy/systemd/{name}.service").read_text()
    unit = tmp_path / f"{name}.service"
    unit.write_text(text.replace("/opt/llamaq/bin/llamaq", sys.executable))  # systemd-analyze wants an existing program
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_files_of_the_services_are_those_that_the_page_of_operations_writes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (settings,) = re.findall(r"^cat > /etc/llamaq/worker.toml <<'END'\n(.*?)^END$", page, re.DOTALL | re.MULTILINE)
    path = tmp_path / "worker.toml"
    path.write_text(settings)
    assert load_settings(path).devices == (0, 1)
    for name in SERVICES:
        service = service_of_systemd(name)
        assert service["EnvironmentFile"] == "/etc/llamaq/redis.env"
        assert service["EnvironmentFile"] in page
    assert service_of_systemd("llamaq-worker")["ExecStart"].endswith(" worker --config /etc/llamaq/worker.toml")
