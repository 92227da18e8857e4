"""The supervisor runs one worker process per device, restarts it when it dies, and releases its jobs."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis
from tests.support.redis_servers import wait_until
from tests.support.supervisors import PROMPT, children_of, start_supervisor, supervise

from llamaq.common.protocol.job_outcome import JobState
from llamaq.producer import Client
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment, Read, Reader

LLAMAQ = Path(sys.executable).with_name("llamaq")
ONE_SLOT: Any = {"LLAMAQ_LEASE_S": "300", "LLAMAQ_N_PARALLEL": "1", "LLAMAQ_INBOX_WINDOW": "1"}
"""A worker with one slot, in which one more job waits. Its leases do not expire during a test."""


def read_two_jobs(client: Client, read: Read) -> list[Reader]:
    """Submit two jobs to a worker with `ONE_SLOT`, and wait until one of them runs and the other waits."""
    readers = [read(client.submit(PROMPT, max_tokens=150, ignore_eos=True)) for _ in range(2)]
    wait_until(lambda: any(reader.n_tokens >= 5 for reader in readers), "one job runs, and the other waits")
    return readers


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
        both = {untouched, victim}
        wait_until(lambda: {worker.card.pid for worker in client.workers()} >= both, "both workers have a card")
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
    # The card of a dead worker lives for five heartbeats: here longer than a worker takes to start on a busy machine.
    supervisor = supervise(environment, 1, LLAMAQ_HEARTBEAT_S="10", LINGER_TOKENS="50", **ONE_SLOT)
    with environment.client() as client:
        readers = read_two_jobs(client, read)
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
    # The card of a dead worker lives for five heartbeats: here longer than a worker takes to start on a busy machine.
    supervisor = supervise(environment, 1, LLAMAQ_HEARTBEAT_S="10", LINGER_TOKENS="50", **ONE_SLOT)
    with environment.client() as client:
        readers = read_two_jobs(client, read)
        (child,) = children_of(supervisor.pid)
        supervisor.signal(signal.SIGSTOP)  # so that it cannot see the death of its child
        os.kill(child, signal.SIGKILL)
        supervisor.signal(signal.SIGKILL)
        following = environment.start_worker(**ONE_SLOT)
        following.await_output(r"dead_worker\.released worker=\S+ jobs=2")
        for reader in readers:
            assert len(reader.finish().tokens) == 150
            environment.events_of(reader.job)
        assert [worker.card.pid for worker in client.workers()] == [following.pid]


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
