"""More jobs than slots, and more tokens than KV cells: order, fairness, and separate KV cells of the jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from tests.support.workers import only_worker

from llamaq.common.protocol.job_outcome import FinishReason, JobState, Result
from llamaq.producer import Client, JobFailed, QueueDepth
from llamaq.producer.sync import Job
from llamaq.tools.demo_model.fact_questions import Probe, recall_probe

if TYPE_CHECKING:
    from tests.e2e.conftest import Await, ServedQueue

N_JOBS = 32
FACT_DISTANCE_TOKENS = 60


def started_ms(job: Job) -> int:
    started = job.status().started_ms
    assert started is not None
    return started


def window(served: ServedQueue) -> int:
    """Return the largest number of jobs that a worker may have claimed at the same time."""
    return served.settings.n_parallel + served.settings.inbox_window


def is_right(result: Result, probe: Probe) -> bool:
    return result.text.startswith(probe.answer)


@pytest.fixture(scope="module")
def probes() -> list[Probe]:
    """Prompts, each with facts and a question about them. Any two prompts have different answers."""
    probes: dict[str, Probe] = {}
    seed = 0
    while len(probes) < N_JOBS:
        probe = recall_probe(seed, FACT_DISTANCE_TOKENS)
        probes.setdefault(probe.answer, probe)
        seed += 1
    return list(probes.values())


def test_each_of_32_jobs_over_4_slots_recalls_its_own_facts(
    client: Client, demo: ServedQueue, probes: Sequence[Probe]
) -> None:
    with demo.recording() as ticks:
        jobs = [client.submit(probe.prompt, max_tokens=16, temperature=0) for probe in probes]
        results = [job.result(timeout=60) for job in jobs]

    assert {result.finish_reason for result in results} <= {FinishReason.STOP, FinishReason.LENGTH}
    wrong = [result.text for result, probe in zip(results, probes, strict=True) if not is_right(result, probe)]
    assert not wrong, "the model recalls all facts at this distance, so the worker caused a wrong answer"
    of_others = [
        (place, other)
        for place, result in enumerate(results)
        for other, probe in enumerate(probes)
        if other != place and probe.answer not in probes[place].prompt and is_right(result, probe)
    ]
    assert not of_others, "a job gave the answer to another's question"
    assert {result.stats.slot for result in results} == set(range(demo.settings.n_parallel))
    assert max(tick["active_slots"] for tick in ticks) == demo.settings.n_parallel


def test_jobs_in_a_shared_batch_and_alone_give_the_same_answers(client: Client, probes: Sequence[Probe]) -> None:
    crowd = [client.submit(probe.prompt, max_tokens=16, temperature=0) for probe in probes[:8]]
    together = [job.result(timeout=60).text for job in crowd]
    alone = [client.generate(probe.prompt, max_tokens=16, temperature=0).text for probe in probes[:8]]
    assert sum(one == other for one, other in zip(together, alone, strict=True)) >= 7, (together, alone)


def test_jobs_start_in_the_order_in_which_they_were_submitted(client: Client, demo: ServedQueue) -> None:
    jobs = [
        client.submit("Once upon a time", max_tokens=10 + 10 * (index % 4), ignore_eos=True) for index in range(N_JOBS)
    ]
    for job in jobs:
        assert job.result(timeout=60).finish_reason is FinishReason.LENGTH
    submitted = [job.id for job in jobs]
    in_order_of_start = sorted(jobs, key=started_ms)
    for place, job in enumerate(in_order_of_start):
        assert abs(place - submitted.index(job.id)) <= window(demo), f"job {submitted.index(job.id)} started as {place}"


def test_interactive_jobs_start_before_bulk_jobs_that_were_submitted_earlier(
    slow: ServedQueue, slow_client: Client, wait_for: Await
) -> None:
    n_claimed = window(slow)
    bulk = [slow_client.submit("the world", max_tokens=3000, priority="bulk") for _ in range(n_claimed + 3)]
    wait_for(lambda: sum(job.status().state is JobState.RUNNING for job in bulk) == slow.settings.n_parallel)
    waiting = [job for job in bulk if job.status().state is JobState.QUEUED]
    interactive = [slow_client.submit("the world", max_tokens=2) for _ in range(4)]
    for job in interactive:
        job.result(timeout=20)
    last_ms = max(started_ms(job) for job in interactive)
    for job in waiting:
        begun_ms = job.status().started_ms
        assert begun_ms is None or begun_ms >= last_ms
    for job in bulk:
        job.cancel()
        job.result(timeout=20)


def test_a_bulk_job_runs_although_many_interactive_jobs_wait(client: Client, demo: ServedQueue) -> None:
    crowd = [client.submit("Hello", max_tokens=20, ignore_eos=True) for _ in range(2 * window(demo))]
    bulk = client.submit("Hello", max_tokens=2, priority="bulk")
    assert bulk.result(timeout=60).stats.generated_tokens <= 2
    for job in crowd:
        assert job.result(timeout=60).finish_reason is FinishReason.LENGTH


def test_a_prompt_longer_than_the_context_fails_and_other_jobs_finish(narrow_client: Client) -> None:
    n_ctx = only_worker(narrow_client).card.n_ctx
    others = [narrow_client.submit("the world", max_tokens=40) for _ in range(3)]
    too_long = narrow_client.submit(tokens=[7] * n_ctx, max_tokens=1)
    others += [narrow_client.submit("the world", max_tokens=40) for _ in range(3)]
    with pytest.raises(JobFailed, match=rf"{n_ctx} tokens") as failed:
        too_long.result(timeout=60)
    assert failed.value.code == "prompt_too_long"
    assert too_long.status().state is JobState.FAILED
    for job in others:
        assert job.result(timeout=60).stats.generated_tokens == 40


def test_the_longest_prompt_that_fits_generates_one_token(narrow_client: Client) -> None:
    n_ctx = only_worker(narrow_client).card.n_ctx
    result = narrow_client.generate_tokens([7] * (n_ctx - 1), max_tokens=5)
    assert (result.finish_reason, result.stats.generated_tokens) == (FinishReason.LENGTH, 1)


def test_a_job_that_reaches_the_context_limit_ends_with_length_and_the_next_job_finishes(narrow_client: Client) -> None:
    n_ctx = only_worker(narrow_client).card.n_ctx
    limited = narrow_client.submit(tokens=[7] * (n_ctx - 112), max_tokens=10_000, ignore_eos=True)
    after = narrow_client.submit("the world", max_tokens=30)
    result = limited.result(timeout=60)
    assert (result.finish_reason, result.stats.generated_tokens) == (FinishReason.LENGTH, 112)
    assert after.result(timeout=60).stats.generated_tokens == 30


def test_a_small_job_runs_at_once_beside_jobs_that_may_fill_all_cells(slow_client: Client, wait_for: Await) -> None:
    large = [slow_client.submit(tokens=[7] * 10, max_tokens=32_000), slow_client.submit(tokens=[8] * 10)]
    wait_for(lambda: all(job.status().state is JobState.RUNNING for job in large))
    hello = slow_client.submit(tokens=[9] * 5, max_tokens=5)
    assert hello.result(timeout=30).stats.generated_tokens == 5
    for job in large:
        assert job.cancel(), "a large job ended before the small one"
        assert job.result(timeout=20).finish_reason is FinishReason.CANCELLED


def test_every_queue_is_empty_afterwards(
    client: Client, narrow_client: Client, slow_client: Client, wait_for: Await
) -> None:
    for each in (client, narrow_client, slow_client):
        depth = wait_for(lambda each=each: (depth := each.queue_depth()).waiting + depth.running == 0 and depth)
        assert depth == QueueDepth(waiting=0, running=0)
