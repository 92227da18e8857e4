"""On which CPUs llama.cpp's threads run, and with which priority. Each case runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamaq.common.errors import EngineError
from llamaq.worker.engine.thread_pool import ThreadOptions, ThreadPool, make_thread_pool, uses_openmp

pytestmark = [
    pytest.mark.starts_processes,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells on which CPUs a thread runs"),
]
COMPUTE = """
import json, os, sys, threading
from pathlib import Path
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.engine.thread_pool import ThreadOptions, keeping_placement

model, given = sys.argv[1], json.loads(sys.argv[2])
threads = ThreadOptions(frozenset(given.pop("cpus", ())), **given.pop("options", {}))
sizes = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_seq_max": 4, "n_threads": 2, "n_threads_batch": 2, **given}

def placement(thread=0):
    return sorted(os.sched_getaffinity(thread)), os.sched_getscheduler(thread)

before = placement()
others = set(os.listdir("/proc/self/task"))
with keeping_placement():
    engine = Engine(Model(Path(model), ModelOptions(n_gpu_layers=0)), ContextOptions(**sizes, threads=threads))
    engine.warm_up()
assert placement() == before, "loading has moved the thread"
engine.context.place_this_thread()
engine.warm_up()
new = sorted(set(os.listdir("/proc/self/task")) - others)
print(json.dumps({"first": placement(), "others": [placement(int(thread)) for thread in new]}))
engine.close()
"""
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def placements(model: Path, **options: Any) -> tuple[tuple[list[int], int], list[tuple[list[int], int]]]:
    """Return the CPUs and the scheduling policy of the engine thread, and of llama.cpp's other threads."""
    command = [sys.executable, "-c", COMPUTE, str(model), json.dumps(options)]
    # Threads that wait actively on the same CPU would keep each other from it.
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=env)
    found = json.loads(done.stdout)
    first, *others = [(cpus, policy) for cpus, policy in (found["first"], *found["others"])]
    return first, others


@pytest.mark.parametrize("n_threads", [1, 2])
def test_the_threads_run_on_the_chosen_cpus(demo_model: Path, n_threads: int) -> None:
    chosen = CPUS[-1:]
    first, others = placements(demo_model, cpus=chosen, n_threads=n_threads, n_threads_batch=n_threads)
    assert [first, *others] == [(chosen, os.SCHED_OTHER)] * n_threads


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_each_thread_has_one_cpu_if_they_are_strict(demo_model: Path) -> None:
    first, others = placements(demo_model, cpus=CPUS[:2], options={"is_strict": True})
    assert sorted(cpus for cpus, _ in (first, *others)) == [CPUS[:1], CPUS[1:2]]


def test_a_low_priority_is_that_of_batch_programs(demo_model: Path) -> None:
    first, others = placements(demo_model, options={"priority": -1})
    assert [first, *others] == [(CPUS, os.SCHED_BATCH)] * 2


def test_without_options_the_threads_stay_as_they_are(demo_model: Path) -> None:
    first, others = placements(demo_model)
    assert [first, *others] == [(CPUS, os.SCHED_OTHER)] * 2


def test_cpus_that_the_process_may_not_use_are_left_out(demo_model: Path) -> None:
    first, _ = placements(demo_model, cpus=[CPUS[0], 511])
    assert first == (CPUS[:1], os.SCHED_OTHER)
    with pytest.raises(EngineError, match=rf"may use none of these CPUs, but only .*\b{CPUS[0]}\b"):
        ThreadPool(ThreadOptions(frozenset({511})), 2)


def test_openmp_provides_the_threads_unless_an_option_is_set() -> None:
    if uses_openmp():
        assert make_thread_pool(ThreadOptions(), 2) is None
        with pytest.raises(EngineError, match=r"--poll .* OMP_WAIT_POLICY"):
            make_thread_pool(ThreadOptions(poll=0), 2)
    else:
        assert make_thread_pool(ThreadOptions(), 2) is not None
        assert make_thread_pool(ThreadOptions(poll=0), 2) is not None


def test_a_priority_that_the_system_does_not_allow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with pytest.raises(EngineError, match=r"--prio .* Operation not permitted.*LimitRTPRIO"):
        ThreadPool(ThreadOptions(priority=3), 2)
