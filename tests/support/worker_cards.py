"""Cards of workers that do not run."""

from __future__ import annotations

from typing import Any

from llamaq.common.protocol.queue_and_worker_state import WorkerCard


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
