"""The metrics count each job exactly once, over all workers, kills and restarts. Processes serve them over HTTP."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families
from tests.lifecycle.conftest import wait_until

from llamaq.producer import JobState

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment

Values = dict[tuple[str, ...], float]
N_JOBS, MAX_TOKENS = 20, 60
"""More jobs than both workers have slots: each of them runs jobs one after the other."""


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(port: int) -> Values:
    """Return the values of all metrics, by name and sorted labels except the queue."""
    _, text = fetch(port, "/metrics")
    return {
        (one.name, *(f"{name}={value}" for name, value in sorted(one.labels.items()) if name != "queue")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def port_of(output: str) -> int:
    """Return the port in the message `metrics.served` of a process that logs JSON."""
    entries = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    (port,) = [entry["port"] for entry in entries if entry.get("event") == "metrics.served"]
    assert isinstance(port, int)
    return port


def test_jobs_of_two_workers_of_which_one_is_killed_and_restarted_are_counted_exactly(
    environment: Environment, redis_url: str
) -> None:
    server = environment.start(
        "metrics", "--redis-url", redis_url, "--queue", environment.queue, "--port", "0", "--log-format", "json"
    )
    killed = environment.start_worker("--checkpoint-tokens", "5", wait=False, LINGER_TOKENS="12")
    # Its jobs linger too, so that it leaves some of the jobs to the other worker.
    environment.start_worker("--metrics-port", "0", LLAMAQ_LOG_FORMAT="json", wait=False, LINGER_TOKENS="12")
    other = environment.commands[-1]
    for worker in (killed, other):
        worker.await_output("worker.ready")
    with environment.client() as client:
        jobs = [
            client.submit("Once upon a time", max_tokens=MAX_TOKENS, ignore_eos=True, stream=number % 2 == 0)
            for number in range(N_JOBS)
        ]

        killed_id = killed.worker_id

        def has_stored_tokens() -> bool:
            states = [job.status() for job in jobs]
            held = [one for one in states if one.worker == killed_id and one.state is JobState.RUNNING]
            return any(5 < one.generated_tokens < MAX_TOKENS / 2 for one in held)

        wait_until(has_stored_tokens, "the worker has stored tokens of a job")
        killed.signal(signal.SIGKILL)
        environment.let_jobs_finish()
        environment.start_worker(wait=False)
        n_tokens = sum(job.result().stats.generated_tokens for job in jobs)
    assert n_tokens == N_JOBS * MAX_TOKENS
    server.await_output("metrics.served")
    values = scrape(port_of(server.output))
    interactive = "priority=interactive"
    assert values["llamaq_jobs_ended_total", interactive, "reason=length", "state=finished"] == N_JOBS
    for name in ("time_to_first_token_seconds", "queue_wait_seconds", "job_duration_seconds", "prompt_length_tokens"):
        assert values[f"llamaq_{name}_count", interactive] == N_JOBS, name
    assert values["llamaq_output_length_tokens_sum", interactive] == n_tokens
    assert values["llamaq_inter_token_latency_seconds_count", interactive] == n_tokens - N_JOBS
    assert values["llamaq_job_attempts_total",] > N_JOBS
    assert values["llamaq_redis_up",] == 1

    own = scrape(port_of(other.output))
    label = f"worker={json.loads(next(line for line in other.output.splitlines() if 'worker.ready' in line))['id']}"
    assert own["llamaq_worker_tick_duration_seconds_count", label] > MAX_TOKENS
    shared = {key for key in values if label in key}
    assert shared == {key for key in own if label in key}, "both processes serve the same metrics of a worker"
    assert fetch(port_of(other.output), "/health")[0] == 200


def test_without_redis_the_metrics_say_so_and_health_is_503(environment: Environment, free_port: int) -> None:
    server = environment.start(
        "metrics", "--redis-url", f"redis://127.0.0.1:{free_port}/0", "--port", "0", "--log-format", "json"
    )
    server.await_output("metrics.served")
    port = port_of(server.output)
    values = scrape(port)
    assert values["llamaq_redis_up",] == 0
    assert not [name for name, *_ in values if name.startswith("llamaq_queue")]
    assert fetch(port, "/health")[0] == 503
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert {json.loads(line)["event"] for line in server.output.splitlines()} == {
        "metrics.served",
        "metrics.redis_error",
    }
