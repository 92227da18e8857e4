"""A tenant with many jobs does not keep another one waiting, and a job tells how far it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llamaq.common.protocol.job_outcome import JobState
from llamaq.producer import Client
from llamaq.producer.sync import Job

if TYPE_CHECKING:
    from tests.e2e.conftest import Await, ServedQueue

N_JOBS = 400
"""Many more than the worker runs in two job times."""
OPTIONS: dict[str, Any] = {"prompt": "a", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": False}


def started_ms(job: Job) -> int | None:
    return job.status().started_ms


def test_one_job_of_a_tenant_starts_within_two_job_times_of_another_with_many(
    narrow: ServedQueue, narrow_client: Client, wait_for: Await
) -> None:
    client = narrow_client
    of_many: Any = {**OPTIONS, "tenant": "many"}
    many = client.submit_many([of_many] * 2 * narrow.settings.n_parallel)
    wait_for(lambda: started_ms(many[1]))
    client.pause()  # no worker claims a job until all are submitted, however long that takes
    try:
        many += client.submit_many([of_many] * N_JOBS)
        single = client.submit(**OPTIONS, tenant="single")
        tenants = {each.tenant: each.waiting + each.claimed for each in client.queue_depth().tenants}
    finally:
        client.resume()
    assert tenants["many"] >= N_JOBS
    assert tenants["single"] == 1
    result = single.result(timeout=60)
    assert result.stats.generated_tokens == OPTIONS["max_tokens"]
    submitted, started = single.status().submitted_ms, started_ms(single)
    assert submitted is not None
    assert started is not None
    starts = [started_ms(job) or started for job in many]
    assert sum(submitted <= start < started for start in starts) <= 2 * narrow.settings.n_parallel
    assert sum(start < started for start in starts) < N_JOBS - 1, "all jobs of the other tenant had ended"
    client.purge(tenant="many")
    for job in many:
        job.result(timeout=60)
    wait_for(lambda: client.queue_depth().tenants == ())


def test_a_job_tells_its_position_and_then_its_prompt_and_output(slow_client: Client, wait_for: Await) -> None:
    client = slow_client
    options: Any = {"tokens": [7] * 8000, "max_tokens": 4, "cache_prompt": False}
    jobs = client.submit_many([options] * 12)
    positions = [job.position() for job in jobs]
    # The worker claims the first jobs meanwhile, so no position is above the number of jobs before this one.
    assert all(position is None or 0 <= position <= index for index, position in enumerate(positions))
    assert (jobs[-1].status().position or 0) > 0
    status = wait_for(lambda: (found := jobs[0].status()).prefilled_tokens and found)
    assert (status.state, status.position) == (JobState.RUNNING, None)
    assert (status.prompt_tokens, status.max_generated_tokens, status.generated_tokens) == (8000, 4, 0)
    assert 0 < (status.prefilled_tokens or 0) <= 8000
    for job in jobs:
        job.cancel()
    jobs[0].result(timeout=60)
    status = jobs[0].status()
    assert (status.position, status.prompt_tokens) == (None, 8000)
