"""A tick loop with a fake engine, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.support.outputs import first_tokens

from llamaq.common.protocol.queue_and_worker_state import TickStats
from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.job import Job
from llamaq.worker.engine_loop.output_mailbox import Message, OutputMailbox
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.engine_loop.telemetry import Telemetry
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.scheduling.tokens_ahead.draft_model_speculation import DraftModelSpeculation
from llamaq.worker.scheduling.tokens_ahead.draft_sequences import DraftSequences
from llamaq.worker.testing.fake_engine import FakeEngine
from llamaq.worker.testing.fake_job import make_job
from llamaq.worker.testing.scheduler_harness import ManualClock, make_memory, make_scheduler

N_SLOTS = 2
HANG_S = 60.0
POLL_S = 0.001
WAIT_S = 60.0


class RecordingTelemetry(Telemetry):
    """Adds each recorded tick to a list of effects."""

    def __init__(self, effects: list[object]) -> None:
        super().__init__()
        self._effects = effects

    def record_tick(self, stats: TickStats) -> None:
        super().record_tick(stats)
        self._effects.append(stats)


class RecordingMailbox(OutputMailbox):
    """Adds each message to a list of effects."""

    def __init__(self, effects: list[object]) -> None:
        super().__init__()
        self._effects = effects

    def put(self, messages: Sequence[Message]) -> None:
        self._effects += messages


class SlowEngine(FakeEngine):
    """A fake engine. Each batch advances a manual clock by `batch_s` seconds."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.batch_s = 0.0
        self._clock = clock

    def run(self, batch: Batch) -> list[SlotResult]:
        self._clock.now_s += self.batch_s
        return super().run(batch)


class SlowDrafter:
    """A draft model that drafts nothing. Each call advances a manual clock by `draft_s` seconds."""

    def __init__(self, clock: ManualClock, draft_s: float) -> None:
        self._clock, self._draft_s = clock, draft_s

    def add_drafts(self, batch: Batch) -> Batch:
        self._clock.now_s += self._draft_s
        return batch


def speculation_of_model(engine: FakeEngine) -> DraftModelSpeculation:
    """Return the plans for a draft model that was not measured."""
    sequences = DraftSequences(N_SLOTS, n_cells=1000, n_vocab=engine.n_vocab, held_cells=0)
    return DraftModelSpeculation(engine.vocab.end_tokens, 4, sequences, max_missing=64)


class Loop:
    """A tick loop with a fake engine, and its effects in order: recorded ticks and messages."""

    def __init__(
        self,
        capacity: int = 1000,
        engine: type[SlowEngine] = SlowEngine,
        mailbox: type[RecordingMailbox] = RecordingMailbox,
        stream_interval_s: float = 0.0,
        draft_s: float | None = None,
        draft_tokens: int = 0,
    ) -> None:
        self.effects: list[object] = []
        self.clock = ManualClock()
        self.engine = engine(self.clock)
        memory = make_memory(self.engine, n_slots=N_SLOTS)
        speculation = None if draft_s is None else speculation_of_model(self.engine)
        self.scheduler = make_scheduler(
            self.engine, memory, speculation=speculation, draft_tokens=draft_tokens, clock=self.clock
        )
        self.shared = SharedState(RecordingTelemetry(self.effects), mailbox(self.effects))
        self.ticks = TickLoop(
            self.scheduler,
            self.engine,
            self.shared,
            hang_s=HANG_S,
            stream_interval_s=stream_interval_s,
            drafter=None if draft_s is None else SlowDrafter(self.clock, draft_s),
            capacity=capacity,
            clock=self.clock,
        )

    def start(self, job: Job) -> None:
        """Give the job a slot."""
        self.scheduler.submit(job)
        self.scheduler.admit()

    def run_until_empty(self) -> None:
        """Run the loop on this thread until no job is left. Jobs without a slot are withdrawn."""
        self.ticks.stop(HANG_S)
        self.ticks.run()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the loop on a separate thread until the end of the block."""
        thread = threading.Thread(target=self.ticks.run)
        thread.start()
        try:
            yield
        finally:
            self.ticks.stop(0)
            thread.join()


def idle_tick_loop(shared: SharedState) -> TickLoop:
    """Return a tick loop with a fake engine, for tests in which no tick runs."""
    engine = FakeEngine()
    return TickLoop(make_scheduler(engine, make_memory(engine)), engine, shared, hang_s=HANG_S, capacity=4)


def first_letters(n_tokens: int) -> str:
    """Return the first letters that the fake model generates after the prompt of `make_job`."""
    return bytes(first_tokens(make_job().prompt, n_tokens)).decode()
