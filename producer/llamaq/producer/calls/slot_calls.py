"""Calls for the slots of the workers, and for slot states that are saved under a name."""

from __future__ import annotations

from llamaq.common.protocol.slot_commands import SlotAction, SlotFile, WorkerSlots
from llamaq.producer.calls.calls_base import ClientCalls
from llamaq.producer.queries import slot_commands


class SlotCalls(ClientCalls):
    """Calls for the slots of the workers, and for slot states that are saved under a name."""

    async def slots(self, *, worker: str | None = None, timeout: float | None = None) -> tuple[WorkerSlots, ...]:
        """Return the slots of the queue's workers, and the slot states that are saved on their hosts.

        Args:
            worker: The id of one worker. None: all workers of the queue.
            timeout: Longest wait for the replies in seconds. None: the client's `timeout_s`.

        Returns:
            One object for each worker.

        Raises:
            NoWorker: No worker serves the queue.
            InvalidRequest: `worker` does not serve the queue.
            WorkerEnded: A worker ended before it replied.
            ResultTimeout: A reply did not arrive in time.
        """
        return await slot_commands.list_slots(self.connection, worker, timeout)

    async def save_slot(
        self, slot: int, name: str, *, worker: str | None = None, timeout: float | None = None
    ) -> SlotFile:
        """Save the tokens and KV cells of the running or last job of a slot, in a file on the worker's host.

        A saved state with the same name is replaced.

        Args:
            slot: The index of the slot, from 0 on.
            name: The name of the saved state: 1 to 64 letters, digits, `_` and `-`.
            worker: The id of the worker. None: the only worker of the queue.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The name and size of the saved state.

        Raises:
            SlotCommandRefused: The worker refused the command.
            WorkerEnded: The worker ended before it replied.
            InvalidRequest: An argument is not valid, or `worker` is None and several workers serve the queue.
            NoWorker: No worker serves the queue.
            ResultTimeout: The reply did not arrive in time.
        """
        command = slot_commands.build_command(SlotAction.SAVE, slot, name)
        return (await slot_commands.send_to_one(self.connection, worker, command, timeout)).files[0]

    async def restore_slot(
        self, slot: int, name: str, *, worker: str | None = None, timeout: float | None = None
    ) -> SlotFile:
        """Load a saved state into an idle slot, and into the worker's prefix cache.

        If the prompt of a later job begins with the same tokens and the job has the same cache salt, it reuses their KV
        cells.

        Args:
            slot: The index of the slot, from 0 on.
            name: The name of the saved state.
            worker: The id of the worker. None: the only worker of the queue.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The name and size of the saved state.

        Raises:
            LlamaqError: The same errors as `save_slot`.
        """
        command = slot_commands.build_command(SlotAction.RESTORE, slot, name)
        return (await slot_commands.send_to_one(self.connection, worker, command, timeout)).files[0]

    async def erase_slot(self, slot: int, *, worker: str | None = None, timeout: float | None = None) -> int:
        """Evict the tokens of an idle slot from the KV cache. A prefix that other sequences share stays cached.

        Args:
            slot: The index of the slot, from 0 on.
            worker: The id of the worker. None: the only worker of the queue.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The number of tokens that the slot had.

        Raises:
            LlamaqError: The same errors as `save_slot`.
        """
        command = slot_commands.build_command(SlotAction.ERASE, slot)
        return (await slot_commands.send_to_one(self.connection, worker, command, timeout)).n_tokens

    async def erase_saved_slot(self, name: str, *, worker: str | None = None, timeout: float | None = None) -> None:
        """Delete a saved state from the worker's host.

        Args:
            name: The name of the saved state.
            worker: The id of the worker. None: the only worker of the queue.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Raises:
            LlamaqError: The same errors as `save_slot`.
        """
        command = slot_commands.build_command(SlotAction.ERASE, name=name)
        await slot_commands.send_to_one(self.connection, worker, command, timeout)
