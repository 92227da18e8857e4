"""A user writes a strategy with `llamaq.worker` and tests it with `llamaq.worker.testing`, without deeper imports."""

from __future__ import annotations

from collections.abc import Sequence

import llamaq.worker
import llamaq.worker.testing
from llamaq.worker import Batch, BatchStrategy, Slot, decode_tokens, prefill_chunks
from llamaq.worker.testing import FakeEngine, make_job, make_memory, make_scheduler, run_to_end


class OneChunkAtATime:
    """A user's strategy: all streams, and a chunk of one token for each prompt."""

    def build_batch(self, slots: Sequence[Slot], budget: int, chunk_size: int, *, queue_depth: int) -> Batch:
        decode = decode_tokens(slots, budget)
        return Batch(decode, prefill_chunks(slots, budget - len(decode), 1))


def test_every_exported_name_exists_and_is_listed_once_in_order() -> None:
    for module in (llamaq.worker, llamaq.worker.testing):
        assert module.__all__ == sorted(set(module.__all__))
        assert all(hasattr(module, name) for name in module.__all__)


def test_a_users_strategy_runs_on_the_fake_engine() -> None:
    strategy: BatchStrategy = OneChunkAtATime()
    engine = FakeEngine(n_ctx=256)
    scheduler = make_scheduler(engine, make_memory(engine, n_slots=4), strategy=strategy)
    scheduler.submit(make_job("Hello", max_tokens=5))
    outputs = run_to_end(scheduler, engine)
    assert len(outputs) == 1 + 5 + 1, "the slot, the tokens and the end"
    assert [batch.n_tokens for batch in engine.batches] == [1] * (6 + 4)
