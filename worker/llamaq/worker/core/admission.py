"""The record of a job's admission: the cells found in the prefix cache, and the evictions."""

from __future__ import annotations

from dataclasses import dataclass

from llamaq.common.protocol.job_outcome import CacheTier


@dataclass(frozen=True, slots=True)
class Evicted:
    """A cached sequence that was evicted from the device."""

    seq_id: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """The prefix that a job found at its admission, and the sequences that were evicted to make room for the job."""

    matched_tokens: int = 0
    """Number of tokens of the history that the prefix cache has. A load that fails makes the reused prefix shorter."""
    tier: CacheTier | None = None
    """The farthest tier that has some of these tokens. None: no token was found."""
    seq_id: int | None = None
    """The sequence on the device that has, or will have, some of these tokens."""
    evicted: tuple[Evicted, ...] = ()

    @property
    def evicted_tokens(self) -> int:
        """Number of tokens of all evicted sequences."""
        return sum(entry.n_tokens for entry in self.evicted)

    def __str__(self) -> str:
        """Return the fields of the log line, such as `cached_tokens=512 from=device:7`."""
        source = "none" if self.tier is None else self.tier.value
        source += "" if self.seq_id is None else f":{self.seq_id}"
        sequences = ",".join(str(entry.seq_id) for entry in self.evicted) or "none"
        return (
            f"cached_tokens={self.matched_tokens} from={source} "
            f"evicted_tokens={self.evicted_tokens} evicted_sequences={sequences}"
        )
