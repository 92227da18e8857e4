"""The supervisor runs one worker process per device, restarts it when it dies, and leaves no worker behind."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis
from tests.support.forked_children import HELPER_COMMAND
from tests.support.redis_servers import wait_until

from llamaq.common.protocol.job_outcome import JobState
from llamaq.producer import Job
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Command, Environment, Reader

    Read = Callable[[Job], Reader]

LLAMAQ = Path(sys.executable).with_name("llamaq")
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


def test_a_killed_child_is_restarted_after_a_delay_that_doubles(environment: Environment) -> None:
    supervisor = supervise(environment, 2)
    untouched, victim = sorted(children_of(supervisor.pid))
    for round_number in range(2):
        os.kill(victim, signal.SIGKILL)
        supervisor.await_output("worker.ready", 3 + round_number)
        children = children_of(supervisor.pid)
        assert len(children) == 2
        assert "Z" not in children.values()
        assert untouched in children
        (victim,) = set(children) - {untouched}
    backoffs = re.findall(r"child\.died code=-9 lived_s=\S+ restart_in_s=(\S+)", supervisor.output)
    assert backoffs == ["0.1", "0.2"]
    with environment.client() as client:
        assert {worker.card.pid for worker in client.workers()} >= {untouched, victim}
        assert len(client.generate(PROMPT, max_tokens=5).tokens) > 0
    supervisor.signal(signal.SIGTERM)
    assert supervisor.end() == 0


def test_a_child_that_cannot_be_started_at_the_moment_is_started_later(environment: Environment) -> None:
    supervisor = supervise(environment, 2)
    untouched, victim = sorted(children_of(supervisor.pid))
    limits = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (0, limits[1]))  # it can open no pipe for a child
    os.kill(victim, signal.SIGKILL)
    supervisor.await_output("child.not_started error=", 2)
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, limits)
    supervisor.await_output("worker.ready", 3)
    assert untouched in children_of(supervisor.pid)


def test_a_child_whose_model_became_unreadable_is_tried_again_while_the_others_run(
    environment: Environment, demo_model: Path
) -> None:
    model, damaged = environment.folder / "model.gguf", environment.folder / "damaged.gguf"
    shutil.copy(demo_model, model)
    supervisor = supervise(environment, 2, LLAMAQ_MODEL=str(model))
    damaged.write_bytes(b"damaged")
    damaged.replace(model)
    os.kill(max(children_of(supervisor.pid)), signal.SIGKILL)
    supervisor.await_output(r"child\.died code=2 ", 2)
    with environment.client() as client:
        assert client.generate(PROMPT, max_tokens=5).tokens
    shutil.copy(demo_model, damaged)
    damaged.replace(model)
    supervisor.await_output("worker.ready", 3)


def test_a_worker_is_supervised_by_default(environment: Environment) -> None:
    # new interpreters, as for users: all other tests fork their workers
    worker = environment.run([str(LLAMAQ), "worker"], **environment.worker_variables())
    worker.await_output("worker.ready")
    (child,) = children_of(worker.pid)
    os.kill(child, signal.SIGKILL)
    worker.await_output("worker.ready", 2)
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    alone = environment.start_worker()
    assert not [line for line in environment.running_processes().values() if "llamaq.worker.process.child_main" in line]
    alone.signal(signal.SIGTERM)
    assert alone.end() == 0


def test_the_job_of_a_killed_child_continues(environment: Environment, read: Read) -> None:
    supervisor = supervise(environment, 1, LINGER_TOKENS="50")
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=100, ignore_eos=True))
        reader.await_tokens(5)
        (child,) = children_of(supervisor.pid)
        os.kill(child, signal.SIGKILL)
        environment.let_jobs_finish()
        assert len(reader.finish().tokens) == 100
        environment.events_of(reader.job)


def test_the_jobs_of_a_killed_child_do_not_wait_for_their_leases(environment: Environment, read: Read) -> None:
    settings: Any = {"LLAMAQ_LEASE_S": "300", "LLAMAQ_N_PARALLEL": "1", "LLAMAQ_INBOX_WINDOW": "1"}
    # The card of a dead worker lives for five heartbeats: here longer than a worker takes to start on a busy machine.
    supervisor = supervise(environment, 1, LLAMAQ_HEARTBEAT_S="10", LINGER_TOKENS="50", **settings)
    with environment.client() as client:
        jobs = [client.submit(PROMPT, max_tokens=150, ignore_eos=True) for _ in range(2)]  # one waits in the window
        readers = [read(job) for job in jobs]
        wait_until(lambda: any(reader.n_tokens >= 5 for reader in readers), "one job runs, and the other waits")
        (child,) = children_of(supervisor.pid)
        os.kill(child, signal.SIGKILL)
        environment.let_jobs_finish()
        for reader in readers:
            assert len(reader.finish().tokens) == 150
        supervisor.await_output(r"dead_worker\.released worker=\S+ jobs=2")
        assert [worker.card.worker for worker in client.workers()] == [
            supervisor.await_output(r"worker\.ready id=(\S+)", 2)[1]
        ]


def test_the_next_worker_releases_the_jobs_of_a_worker_that_was_killed_with_its_supervisor(
    environment: Environment, read: Read
) -> None:
    settings: Any = {"LLAMAQ_LEASE_S": "300", "LLAMAQ_N_PARALLEL": "1", "LLAMAQ_INBOX_WINDOW": "1"}
    # The card of a dead worker lives for five heartbeats: here longer than a worker takes to start on a busy machine.
    supervisor = supervise(environment, 1, LLAMAQ_HEARTBEAT_S="10", LINGER_TOKENS="50", **settings)
    with environment.client() as client:
        jobs = [client.submit(PROMPT, max_tokens=150, ignore_eos=True) for _ in range(2)]  # one waits in the window
        readers = [read(job) for job in jobs]
        wait_until(lambda: any(reader.n_tokens >= 5 for reader in readers), "one job runs, and the other waits")
        (child,) = children_of(supervisor.pid)
        supervisor.signal(signal.SIGSTOP)  # so that it cannot see the death of its child
        os.kill(child, signal.SIGKILL)
        supervisor.signal(signal.SIGKILL)
        following = environment.start_worker(**settings)
        following.await_output(r"dead_worker\.released worker=\S+ jobs=2")
        for reader in readers:
            assert len(reader.finish().tokens) == 150
            environment.events_of(reader.job)
        assert [worker.card.pid for worker in client.workers()] == [following.pid]


def test_after_sigterm_every_child_finishes_its_running_jobs(environment: Environment, read: Read) -> None:
    supervisor = supervise(environment, 2, LLAMAQ_N_PARALLEL="1", LLAMAQ_INBOX_WINDOW="0", LINGER_TOKENS="20")
    with environment.client() as client:
        jobs = [client.submit(PROMPT, max_tokens=80, ignore_eos=True) for _ in range(3)]
        readers = [read(job) for job in jobs[:2]]
        for reader in readers:
            reader.await_tokens(3)
        supervisor.signal(signal.SIGTERM)
        supervisor.await_output("worker.stopping", 2)
        environment.let_jobs_finish()
        workers = {reader.finish().stats.worker for reader in readers}
        assert len(workers) == 2
        assert supervisor.end() == 0
        assert client.workers() == ()
        assert jobs[2].status().state is JobState.QUEUED
        assert not environment.running_processes()


def test_running_jobs_finish_where_sigterm_reaches_the_child_and_the_supervisor(
    environment: Environment, read: Read
) -> None:
    supervisor = supervise(environment, 1, LLAMAQ_DRAIN_S="300", LINGER_TOKENS="20")
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=80, ignore_eos=True))
        reader.await_tokens(3)
        (child,) = children_of(supervisor.pid)
        os.kill(child, signal.SIGTERM)  # systemd sends SIGTERM to all processes of a service
        supervisor.await_output("worker.stopping")
        supervisor.signal(signal.SIGTERM)
        supervisor.await_output("worker.stopping", 2)
        reader.await_tokens(reader.n_tokens + 5)
        environment.let_jobs_finish()
        assert len(reader.finish().tokens) == 80
        assert reader.job.status().attempt == 1
    assert supervisor.end() == 0
    assert "job.unfinished" not in supervisor.output


def test_a_second_signal_to_the_supervisor_requeues_the_jobs_of_its_child_at_once(
    environment: Environment, read: Read
) -> None:
    supervisor = supervise(environment, 1, LLAMAQ_DRAIN_S="300", LINGER_TOKENS="20")
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=400, ignore_eos=True))
        reader.await_tokens(3)
        supervisor.signal(signal.SIGTERM)
        supervisor.await_output("worker.draining")
        supervisor.signal(signal.SIGTERM)
        assert supervisor.end() == 130
        assert reader.job.status().state is JobState.QUEUED
        assert reader.job.cancel()
        reader.finish()
    assert "job.unfinished" in supervisor.output


def test_the_jobs_of_a_child_that_dies_during_the_drain_are_released_at_once(
    environment: Environment, read: Read
) -> None:
    settings: Any = {"LLAMAQ_LEASE_S": "300", "LLAMAQ_N_PARALLEL": "1", "LLAMAQ_INBOX_WINDOW": "0"}
    supervisor = supervise(environment, 2, LINGER_TOKENS="20", LLAMAQ_DRAIN_S="300", **settings)
    with environment.client() as client:
        readers = [read(client.submit(PROMPT, max_tokens=400, ignore_eos=True)) for _ in range(2)]
        for reader in readers:
            reader.await_tokens(3)
        supervisor.signal(signal.SIGTERM)
        supervisor.await_output("worker.stopping", 2)
        victim, survivor = readers
        (pid,) = (one.card.pid for one in client.workers() if one.card.worker == victim.job.status().worker)
        os.kill(pid, signal.SIGKILL)
        supervisor.await_output(r"dead_worker\.released worker=\S+ jobs=1")
        assert victim.job.status().state is JobState.QUEUED
        assert survivor.job.status().state is JobState.RUNNING, "the drain of the other child had ended"
        environment.let_jobs_finish()
        assert len(survivor.finish().tokens) == 400
        assert supervisor.end() == 1
        assert victim.job.cancel()
        victim.finish()
        assert not environment.running_processes()


def test_a_child_that_cannot_requeue_its_jobs_after_the_drain_is_released(environment: Environment, read: Read) -> None:
    supervisor = supervise(environment, 1, LLAMAQ_LEASE_S="300", LLAMAQ_DRAIN_S="300", LINGER_TOKENS="20")
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=400, ignore_eos=True))
        reader.await_tokens(3)
        supervisor.signal(signal.SIGTERM)
        supervisor.await_output("worker.stopping")
        (child,) = children_of(supervisor.pid)
        os.kill(child, signal.SIGKILL)
        assert supervisor.end() == 1
        assert reader.job.status().state is JobState.QUEUED
        assert client.workers() == ()
        assert reader.job.cancel()
        reader.finish()


def test_a_second_signal_stops_all_children_at_once(environment: Environment, read: Read) -> None:
    supervisor = supervise(environment, 2)
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=1500, ignore_eos=True))
        reader.await_tokens(3)
        supervisor.signal(signal.SIGINT)
        supervisor.await_output("worker.stopping", 2)
        signalled_s = time.monotonic()
        supervisor.signal(signal.SIGINT)
        assert supervisor.end() == 130
        assert time.monotonic() - signalled_s < 15, "the second signal did not end the drain, which takes 30 s"
        assert client.workers() == ()
        assert reader.job.status().state is JobState.QUEUED, "the worker did not requeue its job"
        assert not environment.running_processes()


def test_children_requeue_their_jobs_and_end_when_their_supervisor_is_killed(
    environment: Environment, read: Read
) -> None:
    supervisor = supervise(environment, 2)
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=1500, ignore_eos=True))
        reader.await_tokens(3)
        supervisor.signal(signal.SIGKILL)
        supervisor.end()
        environment.await_no_process(timeout_s=20)  # less than a drain
        assert client.workers() == ()
        assert reader.job.status().state is JobState.QUEUED


def test_children_that_wait_for_redis_end_when_their_supervisor_is_killed(
    environment: Environment, free_port: int
) -> None:
    variables = environment.worker_variables(LLAMAQ_REDIS_URL=f"redis://127.0.0.1:{free_port}/0")
    supervisor = start_supervisor(environment, 1, **variables)
    supervisor.await_output("worker.redis_error")
    supervisor.signal(signal.SIGKILL)
    supervisor.end()
    environment.await_no_process(timeout_s=20)  # less than a drain


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("LLAMAQ_MODEL", "no-such-file.gguf", "--model: there is no file 'no-such-file.gguf'"),
        ("LLAMAQ_REDIS_URL", "http://localhost", "--redis-url (LLAMAQ_REDIS_URL): the schemes of URLs are"),
    ],
)
def test_a_child_that_cannot_start_ends_its_supervisor_with_one_error_line(
    environment: Environment, variable: str, value: str, message: str
) -> None:
    variables = environment.worker_variables(**{variable: value})
    supervisor = start_supervisor(environment, 1, **variables)
    assert supervisor.end() == 2
    (line,) = (line for line in supervisor.output.splitlines() if " ERROR " in line)
    assert message in line
    assert "Traceback" not in supervisor.output
    assert "child.died" not in supervisor.output
    assert not environment.running_processes()


@pytest.mark.parametrize("options", [(), ("--no-supervise",)], ids=" ".join)
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_worker_whose_llama_cpp_cannot_be_loaded_ends_with_one_error_line(
    environment: Environment, options: tuple[str, ...], *, is_broken: bool
) -> None:
    folder = environment.folder / "libraries"
    folder.mkdir()
    if is_broken:
        (folder / "libllama.so").write_text("no library")
    variables = environment.worker_variables(LLAMA_CPP_LIB_PATH=str(folder))
    worker = environment.run([str(LLAMAQ), "worker", *options], **variables)
    assert worker.end() == 2
    assert "llama.cpp cannot be loaded" in worker.output
    assert "--gpus all" in worker.output
    assert "Traceback" not in worker.output
    assert "child.died" not in worker.output


@pytest.fixture
def settings(environment: Environment) -> WorkerSettings:
    return WorkerSettings(redis_url=environment.redis_url, queue=environment.queue, n_threads=1)


def test_each_device_has_one_child(settings: WorkerSettings) -> None:
    several = Supervisor.of_devices(settings.model_copy(update={"devices": (0, 3), "model": "x.gguf"}))
    assert [child.settings.device for child in several.children] == [0, 3]
    assert [child.settings.devices for child in several.children] == [(), ()]
    assert [child.settings.model for child in several.children] == ["x.gguf"] * 2
    assert [child.settings.device for child in Supervisor.of_devices(settings).children] == [None]


def test_a_supervisor_can_be_started_checked_and_stopped_by_calls(
    settings: WorkerSettings, environment: Environment
) -> None:
    with (environment.folder / "log").open("w+b") as log:
        supervisor = Supervisor([settings], log)
        supervisor.start()
        with environment.client() as client:
            while not client.workers():
                assert supervisor.check() is None
                time.sleep(0.02)
            assert len(client.generate(PROMPT, max_tokens=3).tokens) > 0
            assert supervisor.stop(drain_s=5)
            assert client.workers() == ()
        assert b"worker.stopped" in (environment.folder / "log").read_bytes()


def test_children_that_are_stopped_before_they_are_ready_have_ended_without_a_fault(settings: WorkerSettings) -> None:
    supervisor = Supervisor([settings])
    supervisor.start()
    assert supervisor.stop(drain_s=60)
    assert [child.pid for child in supervisor.children] == [None]


def test_workers_with_exit_when_empty_run_all_jobs_and_end_with_exit_code_0(environment: Environment) -> None:
    with environment.client() as client:
        jobs = [client.submit(PROMPT, max_tokens=20, ignore_eos=True, seed=seed) for seed in range(8)]
        supervisor = supervise(environment, 2, LLAMAQ_EXIT_WHEN_EMPTY="1", LLAMAQ_EMPTY_S="0.5")
        assert supervisor.end() == 0
        assert {job.status().state for job in jobs} == {JobState.FINISHED}
        assert client.workers() == ()
    assert "child.died" not in supervisor.output
    assert supervisor.output.count("worker.queue_empty") == 2


def test_a_password_in_the_redis_url_is_not_in_the_process_list(environment: Environment) -> None:
    with EmbeddedRedis() as server:
        with Redis.from_url(server.url) as redis:
            redis.config_set("requirepass", "hunter2")
        supervisor = supervise(environment, 1, LLAMAQ_REDIS_URL=server.url.replace("unix://", "unix://:hunter2@"))
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert "llamaq.worker.process.child_main" in listed
        assert "hunter2" not in listed
        assert "hunter2" not in supervisor.output
        supervisor.signal(signal.SIGTERM)
        assert supervisor.end() == 0
