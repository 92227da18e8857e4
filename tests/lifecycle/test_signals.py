"""A worker drains after the first SIGTERM or SIGINT. The second signal stops it at once."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from llamaq.common.errors import LlamaqError
from llamaq.common.protocol.job_outcome import JobState
from llamaq.producer import Client, QueueDepth

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment, Read

PROMPT = "Once upon a time"
LONG_DRAIN_S = "600"
"""A test waits less long for the end of a worker, so a worker that ends has not waited for the end of its drain."""
LONG_LEASE_S = "600"
"""Only a job that is requeued gets to another worker before this time has passed."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_draining_worker_finishes_its_running_jobs_and_leaves_the_others_in_the_queue(
    environment: Environment, read: Read, number: signal.Signals
) -> None:
    first = environment.start_worker("--n-parallel", "2", "--inbox-window", "0", LINGER_TOKENS="20")
    with environment.client() as client:
        jobs = [client.submit(PROMPT, max_tokens=60, ignore_eos=True, seed=seed) for seed in range(5)]
        running = [read(job) for job in jobs[:2]]
        for reader in running:
            reader.await_tokens(3)
        first.signal(number)
        first.await_output("worker.stopping")
        environment.let_jobs_finish()
        results = [reader.finish() for reader in running]
        assert first.end() == 0

        assert {result.stats.worker for result in results} == {first.worker_id}
        assert client.workers() == ()
        assert [job.status().state for job in jobs[2:]] == [JobState.QUEUED] * 3
        assert client.queue_depth() == QueueDepth(waiting=3, running=0)
        second = environment.start_worker(LLAMAQ_BATCH_STRATEGY="decode-maximal")
        assert {read(job).finish().stats.worker for job in jobs[2:]} == {second.worker_id}
    for job in jobs:
        environment.events_of(job)


def test_another_worker_continues_a_job_that_outlasts_the_drain_at_the_next_token(
    environment: Environment, read: Read
) -> None:
    first = environment.start_worker("--drain-s", "0.2", LLAMAQ_LEASE_S=LONG_LEASE_S, LINGER_TOKENS="100")
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=400, ignore_eos=True, temperature=0))
        reader.await_tokens(10)
        second = environment.start_worker(LLAMAQ_LEASE_S=LONG_LEASE_S, LLAMAQ_BATCH_STRATEGY="decode-maximal")
        first.signal(signal.SIGTERM)
        assert first.end() == 0
        result = reader.finish()
    assert "job.requeued" in first.output
    assert result.stats.generated_tokens == 400
    assert result.stats.worker == second.worker_id
    environment.events_of(reader.job)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_a_worker_at_once_and_its_jobs_are_requeued(
    environment: Environment, read: Read, number: signal.Signals
) -> None:
    first = environment.start_worker("--drain-s", LONG_DRAIN_S)
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=800, ignore_eos=True))
        reader.await_tokens(3)
        first.signal(number)
        first.await_output("worker.stopping")
        reader.await_tokens(reader.n_tokens + 10)
        first.signal(number)
        assert first.end() == 130
        assert client.workers() == ()
        assert (client.queue_depth().waiting, client.queue_depth().running) == (1, 0)
        assert reader.job.status().state is JobState.QUEUED
        assert reader.job.cancel()
        assert reader.finish().finish_reason == "cancelled"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_worker_that_waits_for_redis(
    environment: Environment, free_port: int, number: signal.Signals
) -> None:
    url = f"redis://127.0.0.1:{free_port}/0"
    worker = environment.start_worker("--drain-s", LONG_DRAIN_S, wait=False, LLAMAQ_REDIS_URL=url)
    worker.await_output("worker.redis_error")
    worker.signal(number)
    assert worker.end() == 0
    assert "Traceback" not in worker.output


def test_an_idle_worker_stops_at_once(environment: Environment) -> None:
    worker = environment.start_worker("--drain-s", LONG_DRAIN_S)
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    with environment.client() as client:
        assert client.workers() == ()


LONG_TEXT = "WAIT " + "and wait " * 200
"""Longer than the text of a job that the I/O thread itself prepares."""
SLOW_PREPARATION: Any = {"LLAMAQ_BATCH_STRATEGY": "slow_preparation:Slow", "LLAMAQ_LEASE_S": LONG_LEASE_S}
"""The settings of a worker that tokenizes `LONG_TEXT` only while it stops, see slow_preparation.py."""


def submit_text(client: Client, *, for_embedding: bool) -> None:
    """Submit a job with `LONG_TEXT`."""
    if not for_embedding:
        client.submit(LONG_TEXT, max_tokens=1)
        return

    def embed() -> None:
        with suppress(LlamaqError, RuntimeError):  # the client is closed before the embedding is computed
            client.embed(LONG_TEXT, timeout=60)

    threading.Thread(target=embed, daemon=True).start()


@pytest.mark.parametrize("options", [(), ("--embeddings",)], ids=["generation", "embeddings"])
def test_a_stopping_worker_frees_its_model_only_after_the_running_preparations(
    environment: Environment, options: tuple[str, ...]
) -> None:
    worker = environment.start_worker(*options, PREPARATIONS_TIMEOUT_S="60", **SLOW_PREPARATION)
    with environment.client() as client:
        submit_text(client, for_embedding=bool(options))
        worker.await_output("preparation.begun")
        worker.signal(signal.SIGTERM)
        assert worker.end() == 0
        assert client.queue_depth() == QueueDepth(waiting=1, running=0)
    steps = [line for line in worker.output.splitlines() if line in ("preparation.ended", "model.freed")]
    assert steps == ["preparation.ended", "model.freed"]


def test_a_worker_whose_preparation_does_not_end_in_time_does_not_free_its_model(environment: Environment) -> None:
    worker = environment.start_worker(PREPARATIONS_TIMEOUT_S="0.05", MAY_PREPARE="may-prepare", **SLOW_PREPARATION)
    with environment.client() as client:
        submit_text(client, for_embedding=False)
        worker.await_output("preparation.begun")
        worker.signal(signal.SIGTERM)
        worker.await_output("worker.stopped")
        before = worker.output
        (environment.folder / "may-prepare").touch()
        assert worker.end() == 0
        assert "worker.model_not_freed" in before
        assert "model.freed" not in before
