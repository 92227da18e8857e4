"""Fakes for tests without a model: an engine that checks every cell, and builders of jobs, memory and scheduler.

engine = FakeEngine(n_ctx=256)
scheduler = make_scheduler(engine, make_memory(engine, n_slots=4))
scheduler.submit(make_job("Hello", max_tokens=5))
outputs = run_to_end(scheduler, engine)
"""

from __future__ import annotations

from llamaq.worker.testing.fake_engine import FakeEngine, next_letter
from llamaq.worker.testing.fake_job import ByteVocab, GreedySampler, make_job
from llamaq.worker.testing.fake_memory import FakeMemory
from llamaq.worker.testing.scheduler_harness import ManualClock, make_memory, make_scheduler, run_tick, run_to_end

__all__ = [
    "ByteVocab",
    "FakeEngine",
    "FakeMemory",
    "GreedySampler",
    "ManualClock",
    "make_job",
    "make_memory",
    "make_scheduler",
    "next_letter",
    "run_tick",
    "run_to_end",
]
