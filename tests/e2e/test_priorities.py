"""A worker full of bulk jobs runs an interactive job at once, and the bulk jobs lose no token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.workers import only_worker

from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.tools.random_gguf import CHATML, Architecture, ModelSpec, write_model

if TYPE_CHECKING:
    import pytest
    from tests.e2e.conftest import Await, StartWorker

BULK_TOKENS = 600


def test_an_interactive_job_does_not_wait_for_bulk_jobs(
    start_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory, wait_for: Await
) -> None:
    spec = ModelSpec(Architecture.LLAMA, n_ctx=4096, chat_template=CHATML)
    model: Path = write_model(tmp_path_factory.mktemp("models") / "bulk.gguf", spec, seed=1)
    served = start_worker("bulk", model, n_parallel=2, n_ctx=2048, heartbeat_s=0.1, lease_s=2)
    with served.client() as client:
        options: dict[str, Any] = {"max_tokens": BULK_TOKENS, "temperature": 0, "priority": "bulk"}
        bulk = [client.submit(f"bulk {at}", timeout_s=50, **options) for at in range(8)]
        more = [client.submit(f"more {at}", **options) for at in range(40)]  # they end after the interactive jobs
        wait_for(lambda: sum(slot.job_id is not None for slot in only_worker(client).slots) == 2)
        for at in range(4):
            urgent = client.submit(f"urgent {at}", max_tokens=4, temperature=0)
            assert urgent.result(timeout=20).finish_reason is FinishReason.LENGTH
            assert not all(job.status().finished_ms for job in more), "the bulk jobs ended before the interactive job"
        for job in more:
            job.cancel()
        results = [job.result(timeout=60) for job in bulk]
        assert only_worker(client).cache.preemptions > 0
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
        assert [len(result.tokens) for result in results] == [BULK_TOKENS] * 8
        for job, result in zip(bulk, results, strict=True):
            streamed = [token for chunk in job.stream() for token in chunk.tokens]
            assert streamed == list(result.tokens), "a bulk job lost or repeated tokens"


def test_preempted_bulk_jobs_wait_and_a_cancelled_one_keeps_all_its_tokens(
    start_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory, wait_for: Await
) -> None:
    spec = ModelSpec(Architecture.LLAMA, n_ctx=32_768, chat_template=CHATML)
    model: Path = write_model(tmp_path_factory.mktemp("models") / "preempted.gguf", spec, seed=1)
    served = start_worker("preempted", model, n_parallel=2, n_ctx=32_768, bulk_share=0.0)
    with served.client() as client:
        options: dict[str, Any] = {"max_tokens": 12_000, "temperature": 0, "ignore_eos": True}  # they take many seconds
        bulk = [client.submit(f"bulk {at}", priority="bulk", stream=at == 0, **options) for at in range(2)]
        wait_for(lambda: all(job.status().state is JobState.RUNNING for job in bulk))
        wait_for(lambda: bulk[0].status().generated_tokens > 0)
        urgent = [client.submit(f"urgent {at}", **options) for at in range(2)]
        wait_for(lambda: all(job.status().state is JobState.QUEUED for job in bulk))
        depth = client.queue_depth()
        assert (depth.waiting, depth.running) == (2, 2)
        n_stored = [job.status().generated_tokens for job in bulk]
        for job in bulk:
            assert job.cancel()
        for job, n_tokens in zip(bulk, n_stored, strict=True):
            result = job.result(timeout=20)
            assert (result.finish_reason, len(result.tokens)) == (FinishReason.CANCELLED, n_tokens)
            assert result.stats.generated_tokens == n_tokens
            assert result.stats.prompt_tokens > 0, "the worker has ended the job"
            assert (result.stats.preempted_ms or 0) > 0
            assert "".join(chunk.text for chunk in job.stream()) == result.text
        for job in urgent:
            assert job.cancel()
            job.result(timeout=20)


def test_a_bulk_job_gets_its_share_although_interactive_jobs_fill_all_slots_and_is_rarely_started_anew(
    start_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = ModelSpec(Architecture.LLAMA, n_ctx=4096, chat_template=CHATML)
    model: Path = write_model(tmp_path_factory.mktemp("models") / "share.gguf", spec, seed=1)
    served = start_worker("share", model, n_parallel=2, n_ctx=2048, heartbeat_s=0.1, bulk_share=0.25)
    with served.client() as client:
        interactive = [client.submit("urgent", max_tokens=30, temperature=0) for _ in range(8)]
        bulk = client.submit("bulk", max_tokens=100, temperature=0, priority="bulk")
        n_interactive = 0
        while bulk.status().finished_ms is None:  # eight interactive jobs always wait or run
            assert interactive.pop(0).result(timeout=60).finish_reason is FinishReason.LENGTH
            interactive.append(client.submit("urgent", max_tokens=30, temperature=0))
            n_interactive += 1
            assert n_interactive < 400
        assert len(bulk.result(timeout=60).tokens) == 100
        assert bulk.status().attempt <= 2
        for job in interactive:
            job.result(timeout=60)
