"""The batch of one tick, made of decode tokens and prefill chunks, and the engine's result for each part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llamaq.common.errors import JobRejected
from llamaq.worker.core.slot import Slot


class TickBatch(Protocol):
    """What one tick computes. An empty batch is false."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""

    @property
    def n_decode(self) -> int:
        """Number of decode tokens, one for each generating slot."""

    @property
    def n_prefill(self) -> int:
        """Number of prompt tokens."""

    @property
    def n_jobs(self) -> int:
        """Number of jobs with tokens in the batch."""

    def __bool__(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class DecodeToken:
    """The last sampled token of a slot in DECODE. The engine samples the next token from its logits."""

    slot: Slot
    """The slot, in the state DECODE."""

    @property
    def n_tokens(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next `n_tokens` pending tokens of a slot in PREFILL. The engine samples after the last chunk only."""

    slot: Slot
    """The slot, in the state PREFILL."""
    n_tokens: int
    """Number of tokens, from 1 to `slot.n_pending`."""

    @property
    def is_last(self) -> bool:
        return self.n_tokens == self.slot.n_pending


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one `llama_decode` call. It contains at most one part for each slot."""

    decode: tuple[DecodeToken, ...] = ()
    """One token for each generating slot."""
    prefill: tuple[PrefillChunk, ...] = ()
    """The chunks of prompts."""

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

    @property
    def n_jobs(self) -> int:
        return len(self.decode) + len(self.prefill)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


@dataclass(frozen=True, slots=True)
class SlotResult:
    """The engine's result for one slot of the batch."""

    slot: Slot
    n_past: int
    """Number of tokens of the history that the sequence now holds. Smaller than before when cells were lost."""
    token: int | None = None
    """The sampled token. None while a part of the history is still pending."""
    error: JobRejected | None = None
    """The reason why this job fails."""
    no_room: bool = False
    """True when KV memory has no room for the slot's part, even in a batch without other parts. The sequence is then
    unchanged."""
