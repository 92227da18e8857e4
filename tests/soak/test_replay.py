"""The replay of the scenario `combinations` finds every kind of fault: each test changes the output of a real job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.soak.combinations.local_worker import LocalWorker
from tests.soak.combinations.replay import Replay, faults_of_end
from tests.soak.combinations.setting_draws import write_model_files
from tests.soak.combinations.tracked_job import TrackedJob, job_of

from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import JobRequest
from llamaq.worker.core.outputs import JobEnded, NewToken
from llamaq.worker.settings import WorkerSettings

pytestmark = pytest.mark.starts_processes  # it loads models

SETTINGS: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}
MAX_TOKENS = 6
GREEDY = JobRequest(tokens=(5, 6, 7), max_tokens=MAX_TOKENS, seed=1, temperature=0, logprobs=2, cache_salt="alone")
SAMPLED = JobRequest(tokens=(5, 6, 7), max_tokens=MAX_TOKENS, seed=1, temperature=1, top_k=0, min_p=0, mirostat=2)
Change = Callable[[TrackedJob], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_files(tmp_path_factory.mktemp("replay"), "counting").model


@pytest.fixture(scope="module")
def worker(model: Path) -> Iterator[LocalWorker]:
    started = LocalWorker(model, WorkerSettings(model=str(model), **SETTINGS))
    yield started
    started.close()


@pytest.fixture(scope="module")
def replay(model: Path) -> Iterator[Replay]:
    opened = Replay(model, SETTINGS)
    yield opened
    opened.close()


def run(worker: LocalWorker, request: JobRequest) -> TrackedJob:
    """Run a job to its end."""
    tracked = TrackedJob(f"q.0.{time.monotonic_ns():032x}", request, n_attempts=1)
    job = job_of(tracked.prepare(worker.parts.preparer))
    tracked.prompt = job.prompt
    worker.ticks.admit([job])
    while tracked.end is None:
        for message in worker.take_messages():
            if isinstance(message, NewToken):
                tracked.published.append(message)
            elif isinstance(message, JobEnded):
                tracked.end = message
    worker.check_idle()
    return tracked


def change_token(tracked: TrackedJob) -> None:
    tracked.published[3] = tracked.published[3]._replace(token=tracked.published[3].token ^ 1)


def lose_token(tracked: TrackedJob) -> None:
    del tracked.published[3]


def repeat_token(tracked: TrackedJob) -> None:
    tracked.published.insert(3, tracked.published[3])


def change_text(tracked: TrackedJob) -> None:
    tracked.published[3] = tracked.published[3]._replace(text="?")


def change_logprobs(tracked: TrackedJob) -> None:
    logprobs = tracked.published[3].logprobs
    assert logprobs is not None
    tracked.published[3] = tracked.published[3]._replace(logprobs=logprobs._replace(logprob=logprobs.logprob - 1))


def end_early(tracked: TrackedJob) -> None:
    tracked.published.pop()


def end_by_end_token(tracked: TrackedJob) -> None:
    change_end(tracked, reason=FinishReason.STOP)


def end_as_cancelled(tracked: TrackedJob) -> None:
    change_end(tracked, reason=FinishReason.CANCELLED)


def reuse_tokens(tracked: TrackedJob) -> None:
    assert tracked.end is not None
    change_end(tracked, stats=tracked.end.stats.model_copy(update={"prefix_cache_tokens": 2}))


def change_end(tracked: TrackedJob, **changes: object) -> None:
    assert tracked.end is not None
    tracked.end = replace(tracked.end, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [GREEDY, SAMPLED])
def test_a_job_of_a_worker_equals_its_replay(worker: LocalWorker, replay: Replay, asked: JobRequest) -> None:
    n_before = replay.n_tokens
    assert list(replay.faults_of(run(worker, asked), [256])) == []
    assert replay.n_tokens == n_before + MAX_TOKENS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_token, "token 3 is"),
        (lose_token, "token 3 is"),
        (repeat_token, "token 4 is"),
        (change_text, "the text is"),
        (change_logprobs, "the logprob of"),
        (end_early, "after 5 tokens instead of"),
        (end_by_end_token, "token 6 is"),
        (end_as_cancelled, "it was cancelled"),
        (reuse_tokens, "2 tokens of jobs with another salt"),
    ],
)
def test_the_replay_finds_a_changed_output(worker: LocalWorker, replay: Replay, change: Change, message: str) -> None:
    tracked = run(worker, GREEDY)
    change(tracked)
    assert any(message in fault for fault in replay.faults_of(tracked, [256]))


@pytest.mark.parametrize(
    ("options_for", "message"),
    [
        (lambda _: {"min_tokens": MAX_TOKENS + 1}, "it ended after 6 tokens instead of 7"),
        (lambda tokens: {"stop_token_ids": tokens[1:2]}, "it has the stop tokens"),
        (lambda tokens: {"allowed_token_ids": tokens[:1]}, "which are not allowed"),
    ],
)
def test_an_output_that_breaks_an_option_of_its_job_is_a_fault(
    worker: LocalWorker, options_for: Callable[[list[int]], dict[str, Any]], message: str
) -> None:
    """The sampler of the replay would do the same as that of the worker."""
    tracked = run(worker, GREEDY)
    change_end(tracked, reason=FinishReason.STOP)
    assert not any(message in fault for fault in faults_of_end(tracked, [256]))
    tracked.request = tracked.request.model_copy(update=options_for(tracked.tokens))
    assert any(message in fault for fault in faults_of_end(tracked, [256]))
