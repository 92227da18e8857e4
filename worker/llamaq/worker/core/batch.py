"""The tokens of one tick: decode tokens and prefill chunks mixed, and what the engine says of them."""

from __future__ import annotations

from dataclasses import dataclass

from llamaq.common.errors import JobRejected
from llamaq.worker.core.slot import Slot


@dataclass(frozen=True, slots=True)
class DecodeToken:
    """The last sampled token of a slot in DECODE; its logits give the next one."""

    slot: Slot

    @property
    def n_tokens(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next `n_tokens` of the history of a slot in PREFILL; logits are asked for when it ends the history."""

    slot: Slot
    n_tokens: int

    @property
    def is_last(self) -> bool:
        return self.n_tokens == self.slot.n_pending


@dataclass(frozen=True, slots=True)
class Batch:
    """What one `llama_decode` gets. A slot stands in it at most once."""

    decode: tuple[DecodeToken, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()

    @property
    def parts(self) -> tuple[DecodeToken | PrefillChunk, ...]:
        return (*self.decode, *self.prefill)

    @property
    def n_decode(self) -> int:
        return len(self.decode)

    @property
    def n_prefill(self) -> int:
        return sum(chunk.n_tokens for chunk in self.prefill)

    @property
    def n_tokens(self) -> int:
        return self.n_decode + self.n_prefill

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What a tick did for one slot of its batch."""

    slot: Slot
    n_past: int
    """Tokens of the history that the sequence holds now; fewer than before when its cells were lost."""
    token: int | None = None
    """The token sampled, when the slot's history was complete."""
    error: JobRejected | None = None
    """This job cannot go on."""
    no_room: bool = False
    """Nothing happened: KV memory has no room for the part, not even by itself."""
