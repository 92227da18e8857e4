"""What is asked of one worker about its slots, and what it answers."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llamaq.common.protocol.queue_state import SlotSnapshot

NAME_PATTERN = r"^[A-Za-z0-9_\-]{1,64}$"
"""Of a saved state: a plain name and never a path."""
ORDER_ID_PATTERN = r"^[0-9a-f]{32}$"


class _Wire(BaseModel):
    """Read by other versions too: fields that this version does not know are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class SlotAction(StrEnum):
    """What can be asked."""

    LIST = "list"
    SAVE = "save"
    RESTORE = "restore"
    ERASE = "erase"
    """Of a slot its content, or a saved state by its name."""


class SlotCommand(_Wire):
    """One thing asked of one worker."""

    id: str = Field(pattern=ORDER_ID_PATTERN)
    """The answer goes to `keys.reply(id)`."""
    action: SlotAction
    slot: int | None = Field(None, ge=0, le=255)
    name: str | None = Field(None, pattern=NAME_PATTERN)
    deadline_ms: int = Field(ge=0)
    """By the clock of Redis; an order that nobody has taken by then is void."""

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        n_given = (self.slot is not None) + (self.name is not None)
        needed = {SlotAction.LIST: 0, SlotAction.ERASE: 1}.get(self.action, 2)
        if n_given != needed:
            what = ("neither slot nor name", "either slot or name", "slot and name")[needed]
            raise ValueError(f"{self.action.value} takes {what}")
        return self


class SlotFile(_Wire):
    """The state of a slot, saved by a worker under a name."""

    name: str
    n_tokens: int
    n_bytes: int
    saved_ms: int
    is_usable: bool = True
    """Whether it is of this worker's model and settings."""


class SlotReply(_Wire):
    """What a worker answers. An `error` says why nothing was done."""

    error: str | None = None
    slots: tuple[SlotSnapshot, ...] = ()
    files: tuple[SlotFile, ...] = ()
    """Those of the list, or the one that was saved or restored."""
    n_tokens: int = 0
    """Of the content that was erased."""


class WorkerSlots(_Wire):
    """The slots of one worker, and the states that are saved where it runs."""

    worker: str
    slots: tuple[SlotSnapshot, ...]
    files: tuple[SlotFile, ...]
