from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.redis_servers import wait_until

from llamaq.worker.process.other_programs import STAT, OtherPrograms

CPU = "cpu{number} {user} {nice} 0 500 0 0 0 {steal} 0 0\n"
HZ = os.sysconf("SC_CLK_TCK")


class Host:
    """A host with four CPUs, and a process on the first three of them."""

    def __init__(self, folder: Path) -> None:
        self.stat = folder / "stat"
        self.at_s = self.own_s = 100.0
        self.write()
        self.others = OtherPrograms(range(3), self.stat, clock=lambda: self.at_s, own_time=lambda: self.own_s)

    def write(self, *user_s: float, nice_s: float = 0, steal_s: float = 0) -> None:
        """Write the busy times of the CPUs, in seconds. `nice_s` and `steal_s` are those of the first one."""
        lines = "cpu 9999 9999 9999 9999 0 0 0 0 0 0\n"
        for number in range(4):
            user = int(HZ * dict(enumerate(user_s)).get(number, 0))
            nice, steal = (int(HZ * seconds) if number == 0 else 0 for seconds in (nice_s, steal_s))
            lines += CPU.format(number=number, user=user, nice=nice, steal=steal)
        self.stat.write_text(lines + "intr 12345 0 0\nctxt 1\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_time_of_other_programs_is_that_of_the_cpus_without_the_own_one(host: Host) -> None:
    assert host.others.n_busy_cpus() == 0
    host.write(2, 1, 0.5, 2)
    host.at_s, host.own_s = 102, 102.5
    assert host.others.n_busy_cpus() == pytest.approx((3.5 - 2.5) / 2)


def test_time_of_other_virtual_machines_counts(host: Host) -> None:
    host.others.n_busy_cpus()
    host.write(steal_s=1.5)
    host.at_s += 2
    assert host.others.n_busy_cpus() == pytest.approx(0.75)


@pytest.mark.parametrize(("own_nice", "expected"), [(0, 0.0), (-5, 0.0), (10, 1.0)])
def test_time_of_a_lower_priority_counts_for_a_process_of_such_a_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_nice: int, expected: float
) -> None:
    monkeypatch.setattr(os, "getpriority", lambda *_: own_nice)
    host = Host(tmp_path)
    host.others.n_busy_cpus()
    host.write(nice_s=2)
    host.at_s += 2
    assert host.others.n_busy_cpus() == pytest.approx(expected)


def test_a_measurement_takes_half_a_second(host: Host) -> None:
    host.others.n_busy_cpus()
    host.write(3, 3, 3)
    host.at_s += 0.4
    assert host.others.n_busy_cpus() == 0
    host.at_s += 2.6
    assert host.others.n_busy_cpus() == pytest.approx(3)
    host.at_s += 0.4
    assert host.others.n_busy_cpus() == pytest.approx(3)


def test_rounding_does_not_give_negative_times(host: Host) -> None:
    host.others.n_busy_cpus()
    host.at_s, host.own_s = 101, 100.01
    assert host.others.n_busy_cpus() == 0


def test_without_the_file_nothing_is_known(host: Host) -> None:
    host.stat.unlink()
    assert host.others.n_busy_cpus() == 0
    host.at_s += 1
    assert host.others.n_busy_cpus() == 0


@pytest.mark.starts_processes
@pytest.mark.skipif(not STAT.exists(), reason="needs the /proc of Linux")
def test_a_busy_process_of_this_host_is_seen() -> None:
    others = OtherPrograms(os.sched_getaffinity(0))
    others.n_busy_cpus()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        wait_until(lambda: others.n_busy_cpus() > 0.1, "the time of the busy process")
        busy.kill()
