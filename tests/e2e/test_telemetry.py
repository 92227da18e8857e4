"""The measurements of results, of the stats stream, of the worker's snapshots, and of hooks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from redis import Redis
from tests.support.workers import only_worker

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import JobState, JobStats
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_and_worker_state import RecentJob, TickStats, TickTotals, Worker
from llamaq.producer import Client, JobFailed, JobOptions, NoWorker, auto_cancelled_jobs
from llamaq.producer.streaming.timed_wait import TimedWait
from llamaq.worker.engine.llama_log import has_gpu

if TYPE_CHECKING:
    from tests.e2e.conftest import Await, ServedQueue

STORY = "Once upon a time"
TIMES = ("submitted_at", "first_slot_at", "slot_at", "first_token_at", "ended_at")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_stats_of_a_job_are_its_token_counts_times_and_rates(client: Client, demo: ServedQueue) -> None:
    begun = time.monotonic()
    result = client.generate(STORY, max_tokens=50, ignore_eos=True)
    elapsed_ms = (time.monotonic() - begun) * 1000
    stats = result.stats
    assert stats.prompt_tokens == len(client.tokenizer().encode(STORY))
    assert stats.generated_tokens == len(result.tokens) == 50
    assert stats.ttft_ms is not None
    assert 0 < stats.ttft_ms < stats.duration_ms < elapsed_ms
    assert 0 <= stats.queue_ms < elapsed_ms
    assert stats.generation_rate == pytest.approx(49 / (stats.duration_ms - stats.ttft_ms) * 1000, rel=0.05)
    assert stats.prompt_eval_rate is not None
    n_evaluated = stats.prompt_tokens - stats.prefix_cache_tokens
    assert stats.prompt_eval_rate >= 0.99 * n_evaluated / stats.ttft_ms * 1000, (
        "the prefill takes longer than the time to first token"
    )

    assert stats.prefix_cache_ratio == pytest.approx(stats.prefix_cache_tokens / stats.prompt_tokens)
    assert stats.slot in range(demo.settings.n_parallel)
    assert stats.seq_id is not None
    assert stats.worker == only_worker(client).card.worker
    assert stats.mode == "generate"


def test_queue_ms_is_the_time_that_a_job_waited(slow: ServedQueue, slow_client: Client, wait_for: Await) -> None:
    n_slots = slow.settings.n_parallel
    blockers = [slow_client.submit("the world", max_tokens=5000) for _ in range(n_slots)]
    wait_for(lambda: slow_client.queue_depth().running == n_slots)
    late = slow_client.submit("the world", max_tokens=2)
    wait_for(lambda: late.status().attempt)  # it waits for a slot in the worker
    assert late.status().state is JobState.QUEUED
    with Redis.from_url(slow.url) as redis:
        seconds, microseconds = redis.time()
    submitted_ms = late.status().submitted_ms
    assert submitted_ms is not None
    waited_ms = int(seconds) * 1000 + int(microseconds) // 1000 - submitted_ms
    for blocker in blockers:
        blocker.cancel()
    assert 0 < waited_ms <= late.result().stats.queue_ms


def test_a_tick_measurement_has_the_documented_names(client: Client, demo: ServedQueue) -> None:
    with demo.recording() as ticks:
        job = client.submit(STORY, max_tokens=30, ignore_eos=True)
        stats = job.result().stats
    for tick in ticks:
        assert set(tick) == {"name", "worker", *TickStats.model_fields}
        assert tick["worker"] == stats.worker
        assert tick["batch_size"] == tick["decode_tokens"] + tick["prefill_tokens"]
        assert tick["eval_ms"] > 0
        assert tick["active_slots"] == 1
    assert sum(tick["prefill_tokens"] for tick in ticks) == stats.prompt_tokens - stats.prefix_cache_tokens
    assert sum(tick["decode_tokens"] for tick in ticks) == 29, (
        "the number of decode tokens is wrong: the first of 30 tokens comes from the prefill"
    )
    assert sum(tick["eval_ms"] for tick in ticks) <= stats.duration_ms


def test_the_heartbeat_has_the_sums_over_all_ticks(client: Client, wait_for: Await) -> None:
    def next_totals() -> TickTotals:
        """Return the sums of the next heartbeat."""
        sent_ms = only_worker(client).heartbeat_ms
        wait_for(lambda: only_worker(client).heartbeat_ms > sent_ms)
        return only_worker(client).totals

    before = next_totals()
    stats = client.generate(STORY, max_tokens=30, ignore_eos=True).stats
    after = next_totals()
    assert after.decode_tokens - before.decode_tokens == 29
    assert after.prefill_tokens - before.prefill_tokens == stats.prompt_tokens - stats.prefix_cache_tokens
    assert after.eval_ms > before.eval_ms


def test_a_hook_receives_the_stats_of_each_finished_job(client: Client, demo: ServedQueue, wait_for: Await) -> None:
    before = time.time() - 0.01  # Redis measures the submit in milliseconds
    result = client.generate(
        STORY, max_tokens=5, ignore_eos=True, metadata={"user": "u1"}, traceparent=TRACEPARENT, timeout=60
    )
    received = wait_for(lambda: [one for one in demo.measurements() if one.get("job_id") == result.job_id])
    ended = {"job_id": result.job_id, "finish_reason": "length", "error_code": None, "metadata": {"user": "u1"}}
    ended["traceparent"] = TRACEPARENT
    times = {name: received[0].pop(name) for name in TIMES}
    assert received == [{"name": "request.done", **ended, **result.stats.model_dump(mode="json")}]
    rounded = [round(value, 3) for value in times.values()]
    assert rounded == sorted(rounded)
    assert before < times["submitted_at"]
    assert times["ended_at"] < time.time()
    assert times["first_token_at"] - times["slot_at"] == pytest.approx((result.stats.ttft_ms or 0) / 1000, abs=1e-3)
    assert times["ended_at"] - times["slot_at"] == pytest.approx(result.stats.duration_ms / 1000, abs=1e-3)
    assert times["first_slot_at"] - times["submitted_at"] == pytest.approx(result.stats.queue_ms / 1000, abs=1e-3)
    assert set(JobStats.model_fields) < set(received[0])


@pytest.mark.parametrize(
    ("prompt", "options", "code"),
    [
        (STORY, {"logit_bias": {10**6: 1.0}}, "invalid_token"),
        (STORY, {"grammar": "root ::= missing"}, "invalid_grammar"),
        (STORY * 1000, {}, "prompt_too_long"),
    ],
)
def test_a_hook_receives_the_metadata_of_a_job_that_cannot_be_prepared(
    client: Client, demo: ServedQueue, wait_for: Await, prompt: str, options: JobOptions, code: str
) -> None:
    options["metadata"] = {"user": "u1"}
    job = client.submit(prompt, **options)
    with pytest.raises(JobFailed):
        job.result()
    (received,) = wait_for(lambda: [one for one in demo.measurements() if one.get("job_id") == job.id])
    assert (received["error_code"], received["metadata"]) == (code, {"user": "u1"})
    assert received["queue_ms"] > 0


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_hook_is_told_of_a_job_that_ended_while_it_waited_in_the_worker(
    slow: ServedQueue, slow_client: Client, wait_for: Await, how: str
) -> None:
    n_slots = slow.settings.n_parallel
    blockers = [slow_client.submit("the world", max_tokens=5000) for _ in range(n_slots)]
    wait_for(lambda: slow_client.queue_depth().running == n_slots)
    limit_s = 2.5 if how == "deadline" else None  # within this time, the worker must have claimed the job
    late = slow_client.submit("the world", max_tokens=2, queue_timeout_s=limit_s, metadata={"user": "u1"})
    wait_for(lambda: late.status().attempt)
    if how == "cancelled":
        late.cancel()
    assert late.result().finish_reason == how
    (received,) = wait_for(lambda: [one for one in slow.measurements() if one.get("job_id") == late.id])
    assert (received["finish_reason"], received["error_code"]) == (how, None)
    assert received["metadata"] == {"user": "u1"}
    assert received["queue_ms"] > 0
    for blocker in blockers:
        blocker.cancel()
    wait_for(lambda: (depth := slow_client.queue_depth()).waiting + depth.running == 0)


@pytest.mark.parametrize(
    ("options", "code"),
    [({"logit_bias": {10**6: 1.0}}, "invalid_token"), ({"grammar": 'root ::= "' + chr(0x10FFFE) + '"'}, None)],
)
def test_a_hook_can_tell_a_failed_job(
    client: Client, demo: ServedQueue, wait_for: Await, options: JobOptions, code: str | None
) -> None:
    job = client.submit(STORY, **options)
    expected: tuple[str | None, str | None]
    try:
        expected = (job.result().finish_reason.value, None)
    except JobFailed as failed:
        expected = (None, failed.code)
    assert code in (None, expected[1])
    (received,) = wait_for(lambda: [one for one in demo.measurements() if one.get("job_id") == job.id])
    assert (received["finish_reason"], received["error_code"]) == expected
    assert received["worker"] == only_worker(client).card.worker


def test_the_stats_stream_has_every_finished_job_newest_first(
    client: Client, demo: ServedQueue, wait_for: Await
) -> None:
    mine = [client.generate(STORY, max_tokens=5).stats for _ in range(3)]
    recent = wait_for(lambda: (recent := client.stats().recent) and recent[0].stats == mine[-1] and recent)
    assert [one.stats for one in recent[:3]] == mine[::-1]
    assert all(one.finish_reason and one.error_code is None for one in recent[:3])
    with Redis.from_url(demo.url) as redis:
        ((entry, fields),) = redis.xrevrange(Keys().stats(demo.queue), count=1)
    ended_ms = int(entry.partition(b"-")[0])  # the client reads the time of the end from the id of the entry
    assert codec.decode_model(RecentJob, fields[b"job"]).model_copy(update={"ended_ms": ended_ms}) == recent[0]


def test_a_cancelled_job_has_stats(slow_client: Client, wait_for: Await) -> None:
    job = slow_client.submit("the world", max_tokens=5000)
    next(job.stream())
    job.cancel()
    stats = job.result().stats
    assert stats.generated_tokens > 0
    wait_for(lambda: [one.stats for one in slow_client.stats().recent[:1]] == [stats])


def test_the_card_describes_the_worker(client: Client, demo: ServedQueue) -> None:
    (worker,) = client.workers()
    card = worker.card
    assert (card.pid, card.queue, card.model) == (demo.process.pid, demo.queue, "llamaq-demo.gguf")
    assert (card.n_ctx, card.n_parallel) == (demo.settings.n_ctx, demo.settings.n_parallel)
    assert card.n_ctx_train > 0
    assert card.n_vocab > 0
    assert card.quantization
    assert card.chat_template is not None
    assert card.worker
    assert card.host
    assert card.device == ("all" if has_gpu() else "cpu")
    assert card.version
    assert card.started_ms <= worker.heartbeat_ms


def test_a_snapshot_shows_busy_slots_and_then_idle_slots(slow_client: Client, wait_for: Await) -> None:
    jobs = [slow_client.submit("the world", max_tokens=5000) for _ in range(2)]

    def both_slots_busy() -> Worker | None:
        worker = only_worker(slow_client)
        at_work = {slot.job_id for slot in worker.slots if slot.generated_tokens}
        # The slots and the last tick are not of the same moment: the last tick may have completed the second prompt.
        has_decoded_both = worker.last_tick is not None and worker.last_tick.decode_tokens == len(jobs)
        return worker if at_work == {job.id for job in jobs} and has_decoded_both else None

    worker = wait_for(both_slots_busy)
    assert [slot.index for slot in worker.slots] == list(range(4))
    busy = [slot for slot in worker.slots if slot.job_id]
    assert {slot.state for slot in busy} == {"decode"}
    assert all(slot.prefilled_tokens == slot.prompt_tokens > 0 for slot in busy)
    assert {slot.state for slot in worker.slots if not slot.job_id} == {"idle"}
    assert worker.cache.n_cells == worker.card.n_ctx
    assert sum(slot.prompt_tokens for slot in busy) <= worker.cache.reserved_cells < 5000, "max_tokens is not reserved"
    done_before, ticks_before = worker.jobs_done, worker.ticks
    for job in jobs:
        job.cancel()
        job.result()
    after = wait_for(lambda: (worker := only_worker(slow_client)).jobs_done >= done_before + 2 and worker)
    wait_for(lambda: {slot.state for slot in only_worker(slow_client).slots} == {"idle"})
    assert after.ticks > ticks_before
    assert after.heartbeat_ms > worker.heartbeat_ms


def test_queue_depth_counts_waiting_and_running_jobs(slow: ServedQueue, slow_client: Client, wait_for: Await) -> None:
    n_slots = slow.settings.n_parallel
    jobs = [slow_client.submit("the world", max_tokens=5000) for _ in range(n_slots + 3)]
    depth = wait_for(lambda: (depth := slow_client.queue_depth()).running == n_slots and depth)
    assert (depth.waiting, depth.running) == (3, n_slots)
    wait_for(lambda: (tick := only_worker(slow_client).last_tick) is not None and tick.queue_depth >= 3)
    assert slow_client.stats().depth == depth
    for job in jobs:
        job.cancel()
    wait_for(lambda: (depth := slow_client.queue_depth()).waiting + depth.running == 0)


def test_stats_return_depth_workers_and_recent_jobs(client: Client, demo: ServedQueue) -> None:
    client.generate(STORY, max_tokens=2)
    stats = client.stats()
    assert stats.queue == demo.queue
    assert [worker.card.pid for worker in stats.workers] == [demo.process.pid]
    assert stats.recent


def test_a_queue_without_a_worker_has_no_workers_and_no_tokenizer(
    demo: ServedQueue, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_cancelled_jobs, "LAST_WAIT_S", 10.0)  # the search for a worker
    with Client(demo.url, queue) as client:
        assert client.workers() == ()
        assert (client.queue_depth().waiting, client.queue_depth().running) == (0, 0)
        assert client.stats().recent == ()
        with pytest.raises(NoWorker, match=queue):
            client.tokenizer()
        # The time is over when the wait for the job begins.
        with patch.object(TimedWait, "until", return_value=False), pytest.raises(NoWorker, match=queue):
            client.generate(STORY, timeout=60)
        assert client.queue_depth().waiting == 0, "a job whose caller timed out is still in the queue"
