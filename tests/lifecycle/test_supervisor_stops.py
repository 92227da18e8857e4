"""A supervisor that gets a signal lets its children finish their jobs. One that is killed leaves no child behind."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from tests.support.supervisors import PROMPT, children_of, start_supervisor, supervise

from llamaq.common.protocol.job_outcome import JobState

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment, Read


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
    supervisor = supervise(environment, 2, LLAMAQ_DRAIN_S="600", LINGER_TOKENS="20")
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=1500, ignore_eos=True))
        reader.await_tokens(3)
        supervisor.signal(signal.SIGINT)
        supervisor.await_output("worker.stopping", 2)
        supervisor.signal(signal.SIGINT)
        assert supervisor.end() == 130  # `end` waits for a minute, less long than the drain
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
