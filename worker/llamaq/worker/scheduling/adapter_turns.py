"""Decides which jobs a tick computes when jobs use the LoRA adapters of the worker with different scales.

llama.cpp computes a batch with one scale of each adapter. So jobs with other scales wait for a later tick. The jobs
with equal scales form a group, and the groups take turns. A change of the scales lets llama.cpp build its graph again,
so a turn has several ticks if these are short.
"""

from __future__ import annotations

from collections.abc import Callable

from llamaq.worker.core.slot import COMPUTING, Slot

TURN_S = 0.02
"""After this number of seconds, another group has its turn. The streams of the group wait meanwhile, so it is not much
longer than a tick of a large model."""

Scales = tuple[float, ...] | None


class AdapterTurns:
    """Remembers whose turn it is.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._order: list[Scales] = []
        """The groups in the order of their turns. The last one has its turn now."""
        self._began_s = 0.0

    def slots_of_turn(self, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        """Return the slots that the next tick may compute: all slots, unless their jobs use different scales."""
        groups = {slot.active.job.adapter_scales for slot in slots if slot.state in COMPUTING}
        if len(groups) < 2:
            self._order = list(groups)
            return slots
        scales = self._choose(groups)
        return tuple(slot for slot in slots if slot.state in COMPUTING and slot.active.job.adapter_scales == scales)

    def _choose(self, groups: set[Scales]) -> Scales:
        """Return the group that has its turn: the same as before, or the group that has waited longest.

        A new group waits behind the groups that wait already. Otherwise, many short jobs with other scales could keep a
        group from its turn.
        """
        now_s = self._clock()
        if self._order and self._order[-1] in groups and now_s < self._began_s + TURN_S:
            return self._order[-1]
        waiting = [group for group in self._order[:-1] if group in groups]
        new = sorted(groups.difference(self._order), key=repr)
        last = [group for group in self._order[-1:] if group in groups]
        chosen, *others = [*waiting, *new, *last]
        self._order, self._began_s = [*others, chosen], now_s
        return chosen
