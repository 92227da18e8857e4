from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamaq.worker import cpu_cores
from llamaq.worker.cpu_cores import cpu_quota, usable_cores
from llamaq.worker.settings import WorkerSettings


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Four cores with two hardware threads each (0 and 4, 1 and 5, ...), and no control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cpu_cores, "CPUS", tmp_path / "cpus")
    monkeypatch.setattr(cpu_cores, "CGROUPS", tmp_path / "cgroup")
    for cpu in range(8):
        folder = tmp_path / "cpus" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_hardware_threads_of_one_core_count_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() == WorkerSettings().n_threads_alone == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 5})
    assert usable_cores() == 2


def test_only_the_cores_of_the_chosen_cpus_count(machine: Path) -> None:
    assert usable_cores(frozenset({0, 1, 4, 90})) == WorkerSettings(cpu_mask="13").n_threads_alone == 2
    assert usable_cores(frozenset({90})) == 1


def test_a_core_without_a_description_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {90, 91, 92})
    assert usable_cores() == 3


def test_without_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cores() == (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("limit", "expected"), [("250000 100000", 2.5), ("max 100000", None), ("50000 100000", 0.5), ("nonsense", None)]
)
def test_the_quota_of_version_2_is_read(tmp_path: Path, limit: str, expected: float | None) -> None:
    write_group(tmp_path / "mount/pod/box", cpu__max=limit)
    write_group(tmp_path, membership="0::/pod/box\n")
    assert cpu_quota(tmp_path / "mount", tmp_path / "membership") == expected


def test_the_smallest_quota_of_the_groups_above_counts(tmp_path: Path) -> None:
    write_group(tmp_path / "mount/pod/box", cpu__max="max 100000")
    write_group(tmp_path / "mount/pod", cpu__max="300000 100000")
    write_group(tmp_path / "mount", cpu__max="400000 100000")
    write_group(tmp_path, membership="0::/pod/box\n")
    assert cpu_quota(tmp_path / "mount", tmp_path / "membership") == 3


def test_the_quota_of_version_1_is_read(tmp_path: Path) -> None:
    write_group(tmp_path / "mount/cpu,cpuacct/box", cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    write_group(tmp_path, membership="4:memory:/box\n3:cpu,cpuacct:/box\n")
    assert cpu_quota(tmp_path / "mount", tmp_path / "membership") == 1.5
    write_group(tmp_path / "mount/cpu,cpuacct/box", cpu__cfs_quota_us="-1\n")
    assert cpu_quota(tmp_path / "mount", tmp_path / "membership") is None


def test_no_more_threads_than_the_quota_and_at_least_one(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_cores, "cpu_quota", lambda *_: 2.9)
    assert usable_cores() == 2
    monkeypatch.setattr(cpu_cores, "cpu_quota", lambda *_: 0.5)
    assert usable_cores() == 1


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "missing") is None
