"""Makes the outputs of repeated ticks on the publishing thread, while the engine thread computes the next ticks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from llamaq.worker.core.batch import TickBatch
from llamaq.worker.engine_loop.publisher import Publisher
from llamaq.worker.engine_loop.tick_parts_interface import TickRepeater


class ComputedTick(NamedTuple):
    """A tick that the engine has computed."""

    batch: TickBatch
    """What was computed."""
    results: Any
    """The results of the engine."""
    eval_s: float
    """Seconds that the engine took."""
    ended_s: float
    """When the engine ended, on the clock of the tick loop."""


class LateOutputs:
    """Makes and publishes the outputs of the ticks for which `TickRepeater` returned a next batch.

    It takes longer to wake the publishing thread than to make the outputs of one token. Therefore one call of `begin`
    makes the outputs of all ticks that were added since the last call.

    Threads: the engine thread calls all methods. From `begin` to `wait`, the publisher belongs to the publishing
    thread, and the engine thread must not use it.

    Attributes:
        repeater: Decides which ticks are repeated.
    """

    def __init__(self, repeater: TickRepeater, publisher: Publisher) -> None:
        self.repeater = repeater
        self._publisher = publisher
        self._ticks: list[ComputedTick] = []
        self._is_making = False

    def add(self, tick: ComputedTick) -> None:
        """Add the next tick."""
        self._ticks.append(tick)

    def begin(self, batch: Any, *, is_due: bool) -> None:
        """Make the outputs of the added ticks, on the publishing thread.

        Args:
            batch: The next batch, whose draws are prepared too.
            is_due: Whether to publish these outputs and those of earlier calls. False: a later call publishes them.

        Raises:
            BaseException: The outputs of earlier ticks could not be made.
        """
        self.wait()
        ticks, self._ticks = self._ticks, []
        preparation = self.repeater.preparation(batch) if self.repeater.can_prepare else None
        self._publisher.start(partial(self._make, ticks, preparation, is_due))
        self._is_making = True

    def wait(self) -> None:
        """Wait until the outputs of all ticks that were passed on are made. Raises like `begin`."""
        if not self._is_making:
            return
        self._is_making = False
        try:
            self._publisher.join()
        except BaseException:
            self._ticks.clear()  # their outputs must not be published, because earlier outputs are missing
            raise

    def finish(self) -> None:
        """Wait, and make the outputs of the other ticks on this thread, for the next report. Raises like `begin`."""
        self.wait()
        ticks, self._ticks = self._ticks, []
        self._make_outputs(ticks)

    def _make(self, ticks: Sequence[ComputedTick], preparation: Callable[[], None] | None, is_due: bool) -> None:
        self._make_outputs(ticks)
        if is_due:
            self._publisher.publish_here()
        if preparation is not None:
            preparation()  # the tokens do not wait for the masks

    def _make_outputs(self, ticks: Sequence[ComputedTick]) -> None:
        for tick in ticks:
            outputs, n_accepted = self.repeater.late_outputs(tick.batch, tick.results, tick.ended_s)
            self._publisher.add_tick(tick.batch, tick.eval_s, n_accepted)
            self._publisher.add(outputs)
