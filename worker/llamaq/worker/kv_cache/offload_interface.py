"""The tiers behind the device, as `Memory` sees them: where entries go that leave it, and come back from."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.kv_data import Data
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.blocks.block import Block, Chain
from llamaq.worker.kv_cache.prefix_cache import Entry


@dataclass(slots=True)
class OffloadStep:
    """What one step brought."""

    loaded: list[tuple[Run, int, CacheTier]] = field(default_factory=list)
    """The run's sequence holds so many tokens now, the last of them from this tier."""
    fetched: list[Run] = field(default_factory=list)
    """All that was stored has been loaded, or what is left cannot be."""
    kept: list[Entry] = field(default_factory=list)
    """Their cells are stored, as far as that is possible, and may go."""


class Offload(Protocol):
    """Where entries go that leave the device, and where their cells come back from."""

    @property
    def host_bytes(self) -> int: ...

    @property
    def disk_bytes(self) -> int: ...

    @property
    def is_busy(self) -> bool:
        """Whether something waits to be moved."""

    def find(self, tokens: bytes, scope: Scope) -> Chain | None:
        """The longest stored beginning of these tokens; worth nothing after the next `step`, except to `fetch`."""

    def fetch(self, run: Run, stored: Chain) -> None:
        """Begin to load what goes on from the run's `n_past`."""

    def keep(self, entry: Entry) -> bool:
        """Begin to save the entry; False when there is nothing to do, and it may go at once."""

    def read(self, block: Block) -> Future[Data | None]:
        """The data of a block that `find` gave just now; None when its file is not good."""

    def forget(self, tokens: bytes, scope: Scope, n_kept: int) -> None:
        """Remove what is stored of these tokens after the first `n_kept`, as far as nobody else needs it."""

    def abandon(self, seq_id: int) -> None:
        """Forget whatever was to be done for this sequence: it is removed now, or belongs to another."""

    def step(self, budget_s: float) -> OffloadStep:
        """Move for about so long, at least one block."""

    def close(self, entries: Iterable[Entry], timeout_s: float) -> None:
        """Save what a later worker may use."""

    def check_integrity(self) -> None:
        """Raise `AssertionError` when what is stored contradicts itself."""


class NoOffload:
    """Nothing lies behind the device: what leaves it is gone."""

    host_bytes = disk_bytes = 0
    is_busy = False

    def find(self, tokens: bytes, scope: Scope) -> None:  # noqa: ARG002 - the interface's
        return None

    def fetch(self, run: Run, stored: Chain) -> None:  # noqa: ARG002 - the interface's
        raise LookupError(f"{stored!r} is not stored")

    def keep(self, entry: Entry) -> bool:  # noqa: ARG002 - the interface's
        return False

    def read(self, block: Block) -> Future[Data | None]:
        raise LookupError(f"{block!r} is not stored")

    def forget(self, tokens: bytes, scope: Scope, n_kept: int) -> None:
        pass

    def abandon(self, seq_id: int) -> None:
        pass

    def step(self, budget_s: float) -> OffloadStep:  # noqa: ARG002 - the interface's
        return OffloadStep()

    def close(self, entries: Iterable[Entry], timeout_s: float) -> None:
        pass

    def check_integrity(self) -> None:
        pass
