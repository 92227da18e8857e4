"""`generate` and `chat`: functions that an application enqueues on any RQ queue.

Their arguments and results are JSON values, so the queue may have the JSON serializer of RQ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC
from itertools import count
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from llamaq.common.errors import IdempotencyConflict, JobNotFound, LlamaqError, ResultTimeout
from llamaq.common.protocol.job_outcome import FinishReason, JobState, Result
from llamaq.producer import Client
from llamaq.producer import Job as LlamaqJob
from llamaq.producer.rq.library import Job, get_current_job
from llamaq.producer.rq.results_in_prompt import insert_results
from llamaq.producer.rq.withdrawn_run import is_replaced

META_KEY = "llamaq"
"""The key of the progress in the `meta` of an RQ job."""
PROGRESS_S = 2.0
"""Time between two updates of the progress."""
MAX_ID_CHARS = 128
"""Number of characters of an RQ job id that are part of an idempotency key, which is at most 256 long."""


def generate(
    prompt: str,
    *,
    insert: Mapping[str, str] | None = None,
    redis_url: str | None = None,
    queue: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Continue a text, and return the result as a JSON object: an application enqueues this function on an RQ queue.

        story = rq_queue.enqueue(generate, "Once upon a time", max_tokens=64)
        rq_queue.enqueue(generate, "Summarize: {story}", insert={"{story}": story.id}, depends_on=story)

    A retry of the RQ job finds the llamaq job of the previous attempt. It does not compute this job again, unless the
    job failed or was cancelled. If RQ's `job_timeout` is reached, the llamaq job is cancelled. `meta["llamaq"]` of the
    RQ job has the id, the state and the number of generated tokens of the llamaq job.

    Args:
        prompt: The text to continue. Special tokens in it are parsed.
        insert: Maps a text in the prompt to the id of another RQ job. The result of that job replaces the text.
        redis_url: URL of llamaq's Redis. None: the setting of the RQ worker. RQ stores the arguments in its Redis, so a
            password is better in the setting.
        queue: The llamaq queue. None: the setting of the RQ worker.
        **options: Job options; `JobParams` documents each of them.

    Returns:
        The fields of a `Result`: `text`, `tokens`, `finish_reason`, `seed`, `stats` and others.

    Raises:
        InvalidRequest: An argument is not valid, or a job of `insert` has no result.
        QueueFull: The llamaq queue has `max_queue` waiting jobs. A retry of RQ may succeed.
        JobFailed: The llamaq job failed; `code` and `message` give the reason. A retry of RQ submits it again.
    """
    return _run(redis_url, queue, {**options, "prompt": insert_results(prompt, insert or {})})


def chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    insert: Mapping[str, str] | None = None,
    redis_url: str | None = None,
    queue: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Answer a chat, and return the result as a JSON object, like `generate`.

    Args:
        messages: The messages, oldest first.
        insert: Maps a text in the messages to the id of another RQ job. The result of that job replaces the text.
        redis_url: URL of llamaq's Redis, as for `generate`.
        queue: The llamaq queue. None: the setting of the RQ worker.
        **options: Job options; `JobParams` documents each of them.

    Returns:
        The fields of a `Result`.

    Raises:
        LlamaqError: The same errors as `generate`.
    """
    return _run(redis_url, queue, {**options, "messages": insert_results(messages, insert or {})})


def cancel_job(job: Job, connection: Redis) -> None:  # noqa: ARG001 - RQ calls it with both
    """Cancel the llamaq job of an RQ job that was stopped: `enqueue(generate, ..., on_stopped=Callback(cancel_job))`.

    RQ stops a job by SIGKILL of its process, so that process cannot cancel the llamaq job itself.
    """
    job_id = job.get_meta().get(META_KEY, {}).get("job_id")
    if job_id is not None:
        with Client(job.kwargs.get("redis_url"), job.kwargs.get("queue")) as client:
            client.cancel(job_id)


def _run(redis_url: str | None, queue: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    current = get_current_job()
    with Client(redis_url, queue) as client:
        job = _submit(client, {"stream": False, **arguments}, current)
        try:
            result = _wait(job, current)
        except (LlamaqError, RedisError, OSError):
            raise  # the job has ended, or a retry finds it again
        except BaseException:  # the timeout of RQ, or Ctrl-C
            if current is not None and "idempotency_key" not in arguments:
                job.cancel()
            raise
    return result.model_dump(mode="json")


def _submit(client: Client, arguments: dict[str, Any], current: Job | None) -> LlamaqJob:
    """Submit a job, or return the job of an earlier attempt of the same RQ job, unless it failed or was cancelled."""
    if current is None or "idempotency_key" in arguments:
        return client.submit(**arguments)
    prefix = _idempotency_prefix(current)
    for number in count():
        try:
            job = client.submit(**arguments, idempotency_key=f"{prefix}:{number}")
            if job.is_new or _is_useful(job):
                return job
        except (IdempotencyConflict, JobNotFound):
            continue  # a job of `insert` ran again and changed the prompt, or the result has expired just now
    raise AssertionError("count() never ends")


def _idempotency_prefix(current: Job) -> str:
    """Return a text that all attempts of an RQ job have in common, and no other RQ job.

    An application may use the id of an RQ job again, and RQ itself repeats a job (`repeat`) with the same id.
    """
    created_us = int(current.created_at.replace(tzinfo=UTC).timestamp() * 1_000_000)  # not all versions of RQ mark it
    return f"rq:{current.id[:MAX_ID_CHARS]}:{created_us}:{current.repeats_left}"


def _is_useful(job: LlamaqJob) -> bool:
    status = job.status()
    is_cancelled = status.cancel_requested or status.finish_reason is FinishReason.CANCELLED
    return status.state is not JobState.FAILED and not is_cancelled


def _wait(job: LlamaqJob, current: Job | None) -> Result:
    """Wait for the result without a timeout, and store the progress in the `meta` of the RQ job."""
    state = None
    while True:
        if current is not None:
            status = job.status()
            seen = {"job_id": job.id, "state": status.state.value, "generated_tokens": status.generated_tokens}
            if seen != state:
                state = current.meta[META_KEY] = seen
                if not is_replaced(current):
                    current.save_meta()
        try:
            return job.result(timeout=PROGRESS_S)
        except ResultTimeout:
            continue
