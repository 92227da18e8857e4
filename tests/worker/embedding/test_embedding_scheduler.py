"""Which embedding jobs get a slot, and which of their texts share a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.embedding_task import Embedding, EmbeddingTask
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.worker.core.job import Lease
from llamaq.worker.core.outputs import JobEnded, Output, SlotAcquired
from llamaq.worker.embedding.embedding_job import EmbeddingJob, TextBatch, TextResult
from llamaq.worker.embedding.embedding_scheduler import EmbeddingScheduler
from llamaq.worker.scheduling.surplus_jobs import SURPLUS_AFTER_S


def make_job(name: str, *lengths: int, attempt: int = 1, **options: Any) -> EmbeddingJob:
    texts = tuple((7,) * length for length in lengths)
    request = JobRequest(embed=EmbeddingTask(inputs=texts), **options)
    lease = Lease(name, 0, Keys().jobs("q", 0, request.priority), "1-0", attempt)
    return EmbeddingJob(lease, request, texts)


@dataclass
class Rig:
    n_slots: int = 2
    batch_tokens: int = 10
    max_texts: int = 8
    bulk_share: float = 0.0
    now_s: float = 100.0
    outputs: list[Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = EmbeddingScheduler(
            n_slots=self.n_slots,
            batch_tokens=self.batch_tokens,
            max_texts=self.max_texts,
            worker="w",
            bulk_share=self.bulk_share,
            clock=lambda: self.now_s,
        )

    def tick(self, *, failing: str = "") -> list[tuple[str, int]]:
        """Run one tick. Returns the job and the length of each text in its batch."""
        self.scheduler.expire()
        self.scheduler.admit()
        batch = self.scheduler.plan()
        self.outputs += self.scheduler.apply(batch, self.compute(batch, failing)).outputs
        return [(text.job.id, len(text.tokens)) for text in batch.texts]

    def compute(self, batch: TextBatch, failing: str) -> list[TextResult]:
        error = JobRejected(ErrorCode.DECODE_FAILED, "no")
        return [
            TextResult(text, error=error)
            if text.job.id == failing
            else TextResult(text, Embedding(len(text.tokens), 1, bytes(4)))
            for text in batch.texts
        ]

    @property
    def started(self) -> list[str]:
        return [output.job.id for output in self.outputs if isinstance(output, SlotAcquired)]

    @property
    def ends(self) -> dict[str, JobEnded]:
        return {output.job.id: output for output in self.outputs if isinstance(output, JobEnded)}


def test_the_texts_of_several_jobs_share_a_batch_until_none_fits() -> None:
    rig = Rig()
    for job in (make_job("a", 3, 3, 3), make_job("b", 2, 9)):
        rig.scheduler.submit(job)
    assert rig.tick() == [("a", 3), ("b", 2), ("a", 3)]
    assert rig.tick() == [("b", 9)]  # this tick begins with the other job
    assert rig.tick() == [("a", 3)]
    assert {name: end.reason for name, end in rig.ends.items()} == {"a": FinishReason.STOP, "b": FinishReason.STOP}
    assert [each.n_tokens for each in rig.ends["b"].embeddings or ()] == [2, 9]
    assert rig.ends["a"].stats.prompt_tokens == 9
    assert rig.ends["a"].stats.mode == "embed"
    assert not rig.scheduler.has_work


def test_a_batch_has_at_most_as_many_texts_as_llama_cpp_has_sequences() -> None:
    rig = Rig(max_texts=3)
    rig.scheduler.submit(make_job("a", *[1] * 5))
    assert len(rig.tick()) == 3
    assert len(rig.tick()) == 2


def test_an_interactive_job_and_the_tenant_with_fewer_running_jobs_get_the_next_slot() -> None:
    rig = Rig()
    rig.scheduler.submit(make_job("bulk", 9, priority=Priority.BULK))
    for name, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        rig.scheduler.submit(make_job(name, 9, tenant=tenant))
    for _ in range(4):
        rig.tick()
    assert rig.started == ["a1", "b1", "a2", "bulk"]


def test_bulk_jobs_get_their_share_while_interactive_jobs_wait() -> None:
    rig = Rig(n_slots=1, bulk_share=0.5)
    rig.scheduler.submit(make_job("bulk", 9, priority=Priority.BULK))
    for number in range(100):
        rig.scheduler.submit(make_job(f"{number}", 9))
    while "bulk" not in rig.started:
        rig.tick()
    assert len(rig.started) < 90


def test_a_failed_text_fails_its_job_alone() -> None:
    rig = Rig()
    for job in (make_job("bad", 1, 1), make_job("good", 1, 1)):
        rig.scheduler.submit(job)
    rig.tick(failing="bad")
    assert rig.ends["bad"].error is not None
    assert rig.ends["bad"].embeddings is None
    assert rig.ends["good"].reason is FinishReason.STOP


def test_a_cancelled_job_and_one_at_its_deadline_end_without_embeddings() -> None:
    rig = Rig()
    late = make_job("late", 9, 9)
    for job in (make_job("gone", 9), make_job("slow", 9, 9, timeout_s=5.0), late):
        rig.scheduler.submit(job)
    late.times.deadline_s = rig.now_s + 3
    rig.scheduler.cancel("gone")
    rig.tick()
    rig.now_s += 6
    rig.tick()
    reasons = {name: (end.reason, end.embeddings) for name, end in rig.ends.items()}
    deadline = (FinishReason.DEADLINE, None)
    assert reasons == {"gone": (FinishReason.CANCELLED, None), "slow": deadline, "late": deadline}


@pytest.mark.parametrize("attempt", [1, 2])
def test_the_last_submitted_attempt_replaces_the_one_before(attempt: int) -> None:
    rig = Rig()
    old, new = make_job("a", 3, attempt=1), make_job("a", 5, attempt=attempt)
    rig.scheduler.submit(old)
    rig.scheduler.submit(new)
    assert rig.scheduler.release(old.lease) is False
    assert rig.tick() == [("a", 5)]


def test_a_bulk_job_is_withdrawn_only_after_it_has_waited_for_some_time() -> None:
    rig = Rig(n_slots=1)
    for job in (make_job("a", 9, 9), make_job("b", 1, priority=Priority.BULK), make_job("c", 1)):
        rig.scheduler.submit(job)
    rig.tick()
    rig.now_s += SURPLUS_AFTER_S / 2
    assert rig.scheduler.withdraw_surplus(2) == []
    rig.now_s += SURPLUS_AFTER_S / 2
    assert [job.id for job in rig.scheduler.withdraw_surplus(2)] == ["b"]


def test_a_stopping_worker_gets_back_the_jobs_without_a_slot_and_then_all() -> None:
    rig = Rig(n_slots=1)
    for job in (make_job("a", 9, 9), make_job("b", 1), make_job("c", 1, priority=Priority.BULK)):
        rig.scheduler.submit(job)
    rig.tick()
    rig.now_s += SURPLUS_AFTER_S
    assert [job.id for job in rig.scheduler.withdraw_surplus(2)] == ["c"]
    assert [job.id for job in rig.scheduler.withdraw_waiting()] == ["b"]
    assert [job.id for job in rig.scheduler.withdraw_all()] == ["a"]
    assert not rig.ends


def test_the_snapshot_shows_how_far_a_job_is() -> None:
    rig = Rig()
    rig.scheduler.submit(make_job("a", 9, 5))
    rig.tick()
    busy, idle = rig.scheduler.snapshot()
    assert (busy.state, busy.job_id, busy.prompt_tokens, busy.prefilled_tokens) == ("prefill", "a", 14, 9)
    assert (idle.state, idle.job_id) == ("idle", None)


@pytest.mark.parametrize("lengths", [(10,), (1, 10, 1), (10, 10, 10)])
def test_a_text_as_large_as_a_batch_is_computed(lengths: tuple[int, ...]) -> None:
    rig = Rig()
    rig.scheduler.submit(make_job("a", *lengths))
    rig.scheduler.submit(make_job("b", *[1] * 40))
    n_ticks = 0
    while "a" not in rig.ends:
        rig.tick()
        n_ticks += 1
    assert n_ticks <= 2 * len(lengths)
