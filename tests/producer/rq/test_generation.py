"""`generate` and `chat` as RQ jobs: chained, retried without computing twice, timed out, stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from redis import Redis
from rq import Callback, Queue, Retry, get_current_job
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from tests.producer.rq.conftest import MainThreadWorker, work

from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import Client, FinishReason, Result
from llamaq.producer import Job as LlamaqJob
from llamaq.producer.rq import cancel_job, chat, generate, generation, withdrawn_run
from llamaq.producer.testing import serving

pytestmark = pytest.mark.usefixtures("llamaq_settings")


def echo(request: JobRequest) -> list[str]:
    """Return the prompt in angle brackets, in two tokens."""
    prompt = request.messages[-1].content if request.messages else request.prompt
    return [f"<{prompt}", ">"]


@pytest.fixture
def worker(redis_url: str, queue: str) -> Iterator[None]:
    with serving(redis_url, queue, echo):
        yield


@pytest.fixture
def client(redis_url: str, queue: str) -> Iterator[Client]:
    with Client(redis_url, queue) as client:
        yield client


def fetch(job: Job) -> Job:
    """Return the job as it is stored now."""
    return Job.fetch(job.id, connection=job.connection, serializer=JSONSerializer)


@pytest.mark.usefixtures("worker")
def test_results_are_json_and_flow_into_the_prompts_of_dependent_jobs(rq_queue: Queue) -> None:
    story = rq_queue.enqueue(generate, "a {x} b", max_tokens=5, metadata={"n": 1})
    other = rq_queue.enqueue(generate, "c")
    summary = rq_queue.enqueue(
        generate, "sum: {x}{xy} {z}", insert={"{x}": story.id, "{xy}": other.id}, depends_on=[story, other]
    )
    answer = rq_queue.enqueue(
        chat,
        [{"role": "system", "content": "S"}, {"role": "user", "content": "[story]?"}],
        insert={"[story]": summary.id},
        depends_on=summary,
    )
    work(rq_queue)
    result = fetch(story).return_value()
    assert (result["text"], result["finish_reason"], result["metadata"]) == ("<a {x} b>", "stop", {"n": 1})
    assert fetch(summary).return_value()["text"] == "<sum: <a {x} b><c> {z}>"
    assert fetch(answer).return_value()["text"] == "<<sum: <a {x} b><c> {z}>?>"
    progress = fetch(story).get_meta()["llamaq"]
    assert progress["job_id"] == result["job_id"]


@pytest.mark.usefixtures("worker")
def test_a_job_to_insert_without_a_result_fails_with_the_way_out(rq_queue: Queue) -> None:
    job = rq_queue.enqueue(generate, "x", insert={"x": "nothing"})
    work(rq_queue)
    assert "RQ job nothing has no result. Name it in depends_on" in str(fetch(job).latest_result().exc_string)


def test_a_retry_finds_the_llamaq_job_of_the_attempt_before(
    rq_queue: Queue, client: Client, redis_url: str, queue: str
) -> None:
    job = rq_queue.enqueue(crash_after_submit, "p", retry=Retry(max=1))
    with serving(redis_url, queue, echo):
        work(rq_queue)
    stored = fetch(job)
    assert stored.return_value()["text"] == "<p>"
    assert stored.return_value()["job_id"] == stored.get_meta()["llamaq"]["job_id"] == stored.get_meta()["first"]
    assert len(client.stats().recent) == 1


def crash_after_submit(prompt: str) -> dict[str, object]:
    """In the first attempt, submit the job and fail before its result, as a killed process does."""
    job = get_current_job()
    assert job is not None
    if "first" not in job.meta:
        with Client() as client:
            submitted = generation._submit(client, {"prompt": prompt, "stream": False}, job)
        job.meta["first"] = submitted.id
        job.save_meta()
        raise RuntimeError("killed")
    return generate(prompt)


def test_the_timeout_of_rq_cancels_the_llamaq_job_and_the_next_attempt_submits_another(
    rq_queue: Queue, client: Client, monkeypatch: pytest.MonkeyPatch, redis_url: str, queue: str
) -> None:
    monkeypatch.setattr(generation, "PROGRESS_S", 0.1)
    reach_timeout = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    wait = LlamaqJob.result

    def wait_for_timeout(submitted: LlamaqJob, *, timeout: float) -> Result:
        """Wait for the result. The RQ job reaches its timeout after the first of these waits has begun."""
        if reach_timeout.ident is None:
            reach_timeout.start()
        return wait(submitted, timeout=timeout)

    job = rq_queue.enqueue(generate, "p", job_timeout=60)
    with monkeypatch.context() as patched:
        patched.setattr(LlamaqJob, "result", wait_for_timeout)
        try:
            work(rq_queue, MainThreadWorker)  # no llamaq worker serves the queue
        finally:
            reach_timeout.cancel()
    assert fetch(job).get_status() == JobStatus.FAILED
    assert "JobTimeoutException" in str(fetch(job).latest_result().exc_string)
    cancelled = client.job(fetch(job).get_meta()["llamaq"]["job_id"])
    assert cancelled.status().finish_reason is FinishReason.CANCELLED
    with serving(redis_url, queue, echo):
        again = fetch(job)
        again.timeout = 60
        again.requeue()
        work(rq_queue)
    assert fetch(job).return_value()["text"] == "<p>"
    assert fetch(job).return_value()["job_id"] != cancelled.id


@pytest.mark.usefixtures("worker")
def test_a_new_rq_job_with_the_same_id_is_computed_again(rq_queue: Queue) -> None:
    found = []
    for _ in range(2):
        job = rq_queue.enqueue(generate, "p", job_id="daily")
        work(rq_queue)
        found.append(fetch(job).return_value()["job_id"])
    assert found[0] != found[1]


def test_a_stopped_rq_job_cancels_its_llamaq_job(rq_queue: Queue, client: Client, rq_redis: Redis) -> None:
    job = rq_queue.enqueue(generate, "p", on_stopped=Callback(cancel_job))
    submitted = client.submit("p")
    job.meta["llamaq"] = {"job_id": submitted.id}
    job.save_meta()
    fetch(job).stopped_callback(fetch(job), rq_redis)
    assert submitted.status().finish_reason is FinishReason.CANCELLED


def test_outside_of_rq_the_functions_work_without_an_idempotency_key(redis_url: str, queue: str) -> None:
    with serving(redis_url, queue, echo):
        assert generate("p", redis_url=redis_url, queue=queue)["job_id"] != generate("p")["job_id"]


def test_the_progress_is_not_written_into_a_deleted_job(
    rq_queue: Queue, redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = rq_queue.enqueue(generate, "a")
    n_updates = 0

    def is_replaced(rq_job: Job) -> bool:
        """Delete the job before the first update of its progress."""
        nonlocal n_updates
        if not n_updates:
            job.delete()
        n_updates += 1
        return withdrawn_run.is_replaced(rq_job)

    monkeypatch.setattr(generation, "is_replaced", is_replaced)
    with serving(redis_url, queue, echo):
        work(rq_queue)
    assert n_updates
    assert not job.connection.hexists(job.key, "meta")
