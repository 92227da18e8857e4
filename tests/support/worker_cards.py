"""Cards of workers that do not run."""

from __future__ import annotations

from typing import Any

from llamaq.common.protocol import codec
from llamaq.common.protocol.queue_and_worker_state import CacheSnapshot, Worker, WorkerCard
from llamaq.producer.testing import FakeWorker


def make_card(worker: str = "w1", queue: str = "q", **fields: Any) -> WorkerCard:
    """Return a card. `fields` replace its values."""
    values = {
        "model": "m.gguf",
        "n_ctx": 8,
        "n_ctx_train": 8,
        "n_vocab": 8,
        "n_parallel": 1,
        "quantization": "F32",
        "vocab_hash": "0" * 64,
        "host": "h",
        "pid": 1,
        "device": "cpu",
        "version": "1",
        "started_ms": 5000,
    }
    return WorkerCard(worker=worker, queue=queue, **{**values, **fields})


def make_heartbeat(card: WorkerCard) -> Worker:
    """Return the heartbeat of an idle worker with this card."""
    cache = CacheSnapshot(n_cells=512, reserved_cells=0)
    return Worker(card=card, cache=cache, heartbeat_ms=1, tick_age_ms=0)


async def announce_card(worker: FakeWorker, **fields: Any) -> None:
    """Store one heartbeat of a worker. `fields` replace values of its card."""
    card = (await worker.announce()).model_copy(update=fields)
    await worker.redis.hset(worker.keys.worker(worker.name), "worker", codec.encode_model(make_heartbeat(card)))


class KilledWorker(FakeWorker):
    """A fake worker whose heartbeat stays in Redis after its context, as that of a killed worker does."""

    async def __aexit__(self, *_: object) -> None:
        await self.redis.aclose()
