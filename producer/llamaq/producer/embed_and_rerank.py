"""Computes the embeddings of any number of texts, and the scores of any number of documents, with several jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

from llamaq.common.background_tasks import all_of
from llamaq.common.errors import InvalidRequest, JobFailed, ResultTimeout
from llamaq.common.protocol.embedding_task import Embedding
from llamaq.common.protocol.job_options import JobOptions
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.job_request import Priority
from llamaq.producer.argument_checks import check_list
from llamaq.producer.auto_cancelled_jobs import AutoCancelledJobs
from llamaq.producer.submission import build_request

INPUTS_PER_JOB = 32
"""Largest number of texts in one job. Several workers share the texts of one call."""
MAX_JOBS_IN_FLIGHT = 64
"""Largest number of jobs of one call that are in the queue at the same time."""

EmbeddingInput = str | Sequence[int]
"""A text, or token ids."""
EmbeddingInputs = str | Sequence[int] | Sequence[EmbeddingInput]
"""One input, or several."""


class EmbeddingOptions(TypedDict, total=False):
    """The job options of `embed` and `rerank`. `JobParams` describes them."""

    timeout_s: float | None
    queue_timeout_s: float | None
    deadline_s: float | None
    retries: int
    priority: Priority | Literal["interactive", "bulk"]
    tenant: str | None
    idempotency_key: str | None
    cancel_on_disconnect: bool
    traceparent: str | None
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document and how well it answers the query."""

    index: int
    """Position of the document in the call, from 0 on."""
    score: float
    """The score that the model computed. Its range depends on the model; higher is better."""
    n_tokens: int
    """Number of tokens that the model read: query, document and the text around them."""


def as_list(inputs: EmbeddingInputs, name: str = "inputs") -> list[Any]:
    """Return the argument as a list. A single text, or a single list of token ids, becomes a list with one input.

    Raises:
        InvalidRequest: There is no input, or the argument is no list.
    """
    if isinstance(inputs, str):
        return [inputs]
    check_list(name, inputs)
    listed = list(inputs)
    if not listed:
        raise InvalidRequest(f"{name}: at least one text is required")
    return [listed] if all(isinstance(each, int) for each in listed) else listed


def split_task(inputs: Sequence[Any], **task: Any) -> list[dict[str, Any]]:
    """Return the arguments of `submit` for each of the jobs that compute the inputs.

    Args:
        inputs: The texts or token ids.
        **task: The other fields of `EmbeddingTask`. None: not set.
    """
    given = {name: value for name, value in task.items() if value is not None}
    parts = [inputs[start : start + INPUTS_PER_JOB] for start in range(0, len(inputs), INPUTS_PER_JOB)]
    return [{"embed": {"inputs": part, **given}} for part in parts]


def join_results(results: Sequence[Result]) -> tuple[Embedding, ...]:
    """Return the embeddings of all jobs, in the order of the inputs.

    Raises:
        JobFailed: A job has ended before its embeddings were computed: it was cancelled, or has reached a deadline.
    """
    joined: list[Embedding] = []
    for result in results:
        if result.embeddings is None:
            reason = result.finish_reason.value
            raise JobFailed(reason, f"the job ended with {reason!r} before all its embeddings", result.job_id)
        joined += result.embeddings
    return tuple(joined)


def rank(embeddings: Sequence[Embedding], top_n: int | None = None) -> tuple[RankedDocument, ...]:
    """Return the documents by their scores, the best one first.

    Args:
        embeddings: What the jobs computed for each document.
        top_n: Largest number of documents. None: all.
    """
    found = [RankedDocument(index, each.score, each.n_tokens) for index, each in enumerate(embeddings)]
    return tuple(sorted(found, key=lambda one: -one.score)[:top_n])


async def compute(
    jobs: AutoCancelledJobs, tasks: Sequence[dict[str, Any]], options: EmbeddingOptions, timeout: float | None
) -> tuple[Embedding, ...]:
    """Run the jobs of one call. If one fails, the others are cancelled.

    Args:
        jobs: Submits the jobs, and cancels them if the call ends early.
        tasks: The arguments of `submit` for each job.
        options: The job options of the call. An idempotency key is extended by the number of the job.
        timeout: Longest wait for all results in seconds. None: the client's `timeout_s`.

    Raises:
        ResultTimeout: The timeout was reached before all jobs had ended.
    """
    limit = jobs.new_limit(timeout)
    free = asyncio.Semaphore(MAX_JOBS_IN_FLIGHT)
    key = options.get("idempotency_key")

    async def run(number: int, task: dict[str, Any]) -> Result:
        own_key = {} if key is None else {"idempotency_key": f"{key}:{number}"}
        chosen = cast("JobOptions", {**options, **own_key})
        async with free:
            if not limit.remaining_s:
                raise ResultTimeout(f"{len(tasks)} jobs have not ended within {limit.timeout_s:g} s")
            return await jobs.generate_within(await build_request(chosen, stream=False, **task), limit)

    return join_results(await all_of([run(number, task) for number, task in enumerate(tasks)]))
