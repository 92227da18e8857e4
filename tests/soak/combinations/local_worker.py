"""The model side of a worker without Redis: its parts and its tick loop, on a thread of this process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from llamaq.worker.engine_loop.output_mailbox import Message, OutputMailbox
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.plugins import load_strategy
from llamaq.worker.process.generation_parts import GenerationParts
from llamaq.worker.settings import WorkerSettings

HANG_S = 60.0
POLL_S = 0.01


class LocalWorker:
    """A worker that gets its jobs from the test. `close` ends it.

    Raises:
        LlamaqError: The model cannot be loaded, or a setting does not fit it.
    """

    def __init__(self, model: Path, settings: WorkerSettings) -> None:
        strategy = load_strategy(settings.batch_strategy, settings.target_itl_ms)
        self.parts = GenerationParts(model, settings, strategy, "local")
        self._mailbox = OutputMailbox()
        self.capacity = settings.n_parallel + settings.inbox_window
        self.ticks = TickLoop(
            self.parts.scheduler,
            self.parts.engine,
            SharedState(outputs=self._mailbox),
            drafter=self.parts.drafter,
            hang_s=HANG_S,
            stream_interval_s=settings.stream_interval_ms / 1000,
            capacity=self.capacity,
        )
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.ticks.run()
        except BaseException as exc:  # noqa: BLE001 - the test shows it
            self.error = exc

    def take_messages(self) -> Iterator[Message]:
        """Yield the messages since the last call. No receiver is attached to the mailbox, so it keeps them."""
        with suppress(queue.Empty):
            while True:
                yield from self._mailbox._messages.get_nowait()

    def between_ticks(self, call: Callable[[], None]) -> None:
        """Run `call` on the engine thread. Raises its error, or that of the engine thread."""
        future = self.ticks.commands.call(call)
        while not future.done():
            if self.error is not None:
                raise self.error
            time.sleep(POLL_S / 10)
        future.result()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the records of the scheduler contradict each other."""
        self.between_ticks(self.parts.scheduler.check_integrity)

    def check_idle(self) -> None:
        """Wait until there is no work. Raises `AssertionError` if llama.cpp has other cells than the records say."""
        deadline_s = time.monotonic() + HANG_S
        while self.parts.scheduler.has_work:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"no job is left, but {self.parts.scheduler!r} has work")
            time.sleep(POLL_S)
        self.between_ticks(self._check_cells)

    def _check_cells(self) -> None:
        scheduler, engine = self.parts.scheduler, self.parts.engine
        scheduler.check_integrity()
        ledger = scheduler._memory._pool.ledger
        for seq_id in range(engine.sequences.n_sequences):
            n_held = engine.context.last_position(seq_id) + 1
            if n_held != ledger.held(seq_id):
                raise AssertionError(f"sequence {seq_id} has {n_held} cells instead of {ledger.held(seq_id)}")

    def close(self) -> None:
        """Stop without waiting for jobs, save the prefix cache, and free the model."""
        self.ticks.stop(0)
        self._thread.join()
        self.parts.scheduler.withdraw_all()
        self.parts.close()
        self.parts.free_model()
