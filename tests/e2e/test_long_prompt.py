"""A long prompt is prefilled in chunks while other jobs decode. `bench/long_prompt.py` measures their delay."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis
from tests.support.workers import only_worker

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.producer import Client

if TYPE_CHECKING:
    from tests.e2e.conftest import Await, ServedQueue

PROMPT_TOKENS = 800
"""A multiple of the prompt tokens in a tick with all streams."""
LEASE_END_MS = 10**11
"""The idle time of an entry at which its lease expires."""
N_STREAMS = 3
N_RENEWALS = 6
"""The renewals in two leases."""


def test_every_tick_that_prefills_the_long_prompt_also_decodes_every_stream(
    slow: ServedQueue, slow_client: Client, wait_for: Await
) -> None:
    chunk_size = slow.settings.chunk_size
    with slow.recording() as ticks:
        streams = [slow_client.submit("the world", max_tokens=6000) for _ in range(N_STREAMS)]
        for job in streams:
            next(job.stream())
        long = slow_client.submit(tokens=[7] * PROMPT_TOKENS, max_tokens=1, cache_prompt=False)
        stats = long.result(timeout=50).stats
        for job in streams:
            assert job.cancel(), "a stream ended before the prefill of the long prompt"
            job.result(timeout=10)
    assert stats.prompt_tokens == PROMPT_TOKENS
    first = next(index for index, tick in enumerate(ticks) if tick["decode_tokens"] == N_STREAMS)
    reading = [tick for tick in ticks[first:] if tick["prefill_tokens"]]
    assert sum(tick["prefill_tokens"] for tick in reading) == PROMPT_TOKENS
    assert {tick["decode_tokens"] for tick in reading} == {N_STREAMS}
    assert {tick["active_slots"] for tick in reading} == {N_STREAMS + 1}
    assert {tick["prefill_tokens"] for tick in reading} == {chunk_size - N_STREAMS}
    assert all(tick["batch_size"] == tick["decode_tokens"] + tick["prefill_tokens"] for tick in ticks)


@pytest.mark.cpu  # a GPU computes the prompt within the lease
def test_a_job_keeps_its_lease_during_a_prefill_that_is_longer_than_the_lease(
    slow: ServedQueue, slow_client: Client, wait_for: Await
) -> None:
    lease_ms = slow.settings.lease_s * 1000
    job = slow_client.submit(tokens=[7] * 30_000, max_tokens=1, cache_prompt=False)
    idle_ms: list[int] = []
    with Redis.from_url(slow.url) as redis:

        def before_renewals() -> list[int]:
            """Return the longest idle time before each renewal of the lease, in milliseconds."""
            return [before for before, after in pairwise(idle_ms) if after < before]

        def read_for_two_leases() -> bool:
            slot = next((slot for slot in only_worker(slow_client).slots if slot.job_id == job.id), None)
            pending: Any = redis.xpending_range(
                Keys().jobs(slow.queue, 0, Priority.INTERACTIVE), GROUP, min="-", max="+", count=1
            )
            idle_times_ms = [entry["time_since_delivered"] - (LEASE_END_MS - lease_ms) for entry in pending]
            idle_ms.extend(ms for ms in idle_times_ms if ms >= 0)
            started_ms = job.status().started_ms
            seconds, microseconds = redis.time()
            now_ms = int(seconds) * 1000 + int(microseconds) // 1000
            assert slot is None or slot.state == "prefill", "the prefill was shorter than the lease"
            has_lasted = started_ms is not None and now_ms - started_ms > 2 * lease_ms
            return has_lasted and len(before_renewals()) >= N_RENEWALS

        wait_for(read_for_two_leases)
    assert median(before_renewals()) < lease_ms, "a stop of the machine makes some of these times longer, not most"
    assert job.cancel()
    result = job.result(timeout=10)
    assert result.stats.generated_tokens == 0
    assert job.status().attempt == 1
