"""The state of a worker that its heartbeat publishes."""

from __future__ import annotations

from llamaq.common.protocol.queue_and_worker_state import Worker, WorkerCard
from llamaq.worker.engine_loop.telemetry import Telemetry
from llamaq.worker.engine_loop.tick_loop import TickLoop


def describe_worker(card: WorkerCard, ticks: TickLoop, telemetry: Telemetry, now_ms: int) -> Worker:
    """Return the state of a worker at the time `now_ms`. May be called on any thread."""
    snapshot = ticks.snapshot
    return Worker(
        card=card,
        slots=snapshot.slots,
        cache=snapshot.cache,
        last_tick=telemetry.last_tick,
        ticks=telemetry.n_ticks,
        totals=telemetry.totals,
        jobs_done=telemetry.n_jobs_done,
        heartbeat_ms=now_ms,
        tick_age_ms=int(ticks.liveness.tick_age_s * 1000),
    )
