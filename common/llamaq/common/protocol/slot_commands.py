"""The commands that a client sends to one worker about its slots, and the worker's reply."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from llamaq.common.protocol.queue_and_worker_state import SlotSnapshot
from llamaq.common.protocol.wire_model import WireModel

SLOT_FILE_NAME_PATTERN = r"^[A-Za-z0-9_\-]{1,64}$"
"""A plain name without dots and slashes: it becomes the name of a file."""
COMMAND_ID_PATTERN = r"^[0-9a-f]{32}$"


class SlotAction(StrEnum):
    """The action of a slot command."""

    LIST = "list"
    """Return all slots and all saved files."""
    SAVE = "save"
    """Write the state of a slot to a named file."""
    RESTORE = "restore"
    """Read the state of a slot from a named file."""
    ERASE = "erase"
    """Erase the content of a slot, or delete a named file."""


class SlotCommand(WireModel):
    """One command to one worker."""

    id: str = Field(
        pattern=COMMAND_ID_PATTERN,
        description="Id of the command, 32 hexadecimal digits. The reply is written to `keys.reply(id)`.",
    )
    action: SlotAction = Field(description="`list`, `save`, `restore` or `erase`.")
    slot: int | None = Field(
        None, ge=0, le=255, description="Index of the slot, for `save`, `restore`, and `erase` without a name."
    )
    name: str | None = Field(
        None,
        pattern=SLOT_FILE_NAME_PATTERN,
        description="Name of the file, for `save`, `restore`, and `erase` without a slot: 1 to 64 letters, digits, "
        "`_` or `-`.",
    )
    deadline_ms: int = Field(
        ge=0,
        description="Latest start in milliseconds since the epoch, by the clock of Redis. After this time the "
        "worker ignores the command.",
    )

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        n_given = (self.slot is not None) + (self.name is not None)
        needed = {SlotAction.LIST: 0, SlotAction.ERASE: 1}.get(self.action, 2)
        if n_given != needed:
            what = ("neither slot nor name", "either slot or name", "slot and name")[needed]
            raise ValueError(f"{self.action.value} takes {what}")
        return self


class SlotFile(WireModel):
    """A file that contains the saved state of a slot."""

    name: str = Field(description="Name of the file.")
    n_tokens: int = Field(description="Number of tokens in the saved state.")
    n_bytes: int = Field(description="Size of the saved cells in bytes.")
    saved_ms: int = Field(description="Time of the save in milliseconds since the epoch, by the clock of the host.")
    is_usable: bool = Field(True, description="Whether the model and settings of this worker can restore the file.")
    duration_ms: float | None = Field(
        None, description="Milliseconds that the save or the restore took in the worker. None in a list of files."
    )


class SlotReply(WireModel):
    """A worker's reply to a slot command."""

    error: str | None = Field(None, description="Why the worker did nothing. None: the command succeeded.")
    slots: tuple[SlotSnapshot, ...] = Field((), description="All slots, in the reply to `list`.")
    files: tuple[SlotFile, ...] = Field(
        (), description="In the reply to `list`: all files. In the reply to `save` or `restore`: the file."
    )
    n_tokens: int = Field(0, description="Number of tokens that `erase` removed from a slot.")


class WorkerSlots(WireModel):
    """The slots of one worker, and the slot files in its cache folder."""

    worker: str = Field(description="Id of the worker.")
    slots: tuple[SlotSnapshot, ...] = Field(description="All slots, in the order of their indices.")
    files: tuple[SlotFile, ...] = Field(description="All saved slot files.")
