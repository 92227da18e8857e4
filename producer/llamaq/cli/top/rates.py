"""Computes the rates of workers and slots from their successive heartbeats, and the rate at which a queue ends jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llamaq.common.protocol.queue_and_worker_state import RecentJob, Worker

FINISH_WINDOW_S = 300.0
"""Jobs that ended longer ago than this do not count for the rate of a queue."""


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """The work of one worker between two of its heartbeats. None: not known, because there was only one heartbeat so
    far.
    """

    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    """Prompt tokens that were computed; reused tokens do not count."""
    tick_ms: float | None = None
    """Mean time of a tick. None also if the worker had no tick."""
    decode_per_tick: float | None = None
    """Mean number of decode tokens in a batch. None also if the worker had no tick."""
    prefill_per_tick: float | None = None
    """Mean number of prompt tokens in a batch. None also if the worker had no tick."""
    of_jobs: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second of the running jobs by their ids. A job that has just got its slot is missing."""


class RateTracker:
    """Keeps the last heartbeat of each worker, and computes its rates when a newer one arrives."""

    def __init__(self) -> None:
        self._last: dict[str, Worker] = {}
        self._rates: dict[str, WorkerRates] = {}

    def update(self, workers: Iterable[Worker]) -> None:
        """Record the heartbeats of all live workers. The other workers are forgotten."""
        last, rates = {}, {}
        for worker in workers:
            name = worker.card.worker
            before = self._last.get(name)
            if before is not None and worker.heartbeat_ms <= before.heartbeat_ms:
                last[name], rates[name] = before, self._rates[name]  # no new heartbeat since the last reading
            else:
                last[name], rates[name] = worker, WorkerRates() if before is None else rates_between(before, worker)
        self._last, self._rates = last, rates

    def of(self, worker: str) -> WorkerRates:
        """Return the rates of a worker."""
        return self._rates.get(worker, WorkerRates())


def rates_between(before: Worker, after: Worker) -> WorkerRates:
    """Return the rates of a worker between two of its heartbeats, of which `after` is newer."""
    seconds = (after.heartbeat_ms - before.heartbeat_ms) / 1000
    n_ticks = after.ticks - before.ticks
    n_decode = after.totals.decode_tokens - before.totals.decode_tokens
    n_prefill = after.totals.prefill_tokens - before.totals.prefill_tokens
    generated = {slot.job_id: slot.generated_tokens for slot in before.slots}
    of_jobs = {
        slot.job_id: max(0, slot.generated_tokens - generated[slot.job_id]) / seconds
        for slot in after.slots
        if slot.job_id is not None and slot.job_id in generated
    }
    has_ticks = n_ticks > 0
    return WorkerRates(
        tokens_per_s=n_decode / seconds,
        prompt_tokens_per_s=n_prefill / seconds,
        tick_ms=(after.totals.eval_ms - before.totals.eval_ms) / n_ticks if has_ticks else None,
        decode_per_tick=n_decode / n_ticks if has_ticks else None,
        prefill_per_tick=n_prefill / n_ticks if has_ticks else None,
        of_jobs=of_jobs,
    )


def finish_rate(recent: Sequence[RecentJob], now_ms: int) -> float | None:
    """Return the number of jobs that end per second. `recent` has the jobs that ended last, newest first.

    The rate is the number of jobs that ended within `FINISH_WINDOW_S`, minus one, divided by the time since the oldest
    of them ended. While no job ends, the rate decreases. None: fewer than two jobs ended in this time.
    """
    ends_ms = [job.ended_ms for job in recent if now_ms - job.ended_ms <= FINISH_WINDOW_S * 1000]
    if len(ends_ms) < 2 or ends_ms[-1] >= now_ms:
        return None
    return (len(ends_ms) - 1) * 1000 / (now_ms - ends_ms[-1])
