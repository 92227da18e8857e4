"""The interface between `KvMemory` and the storage tiers behind the device: host memory and disk."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.saved_cells import SavedCells
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.blocks.block import Block, StoredPrefix
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence


class LoadedTokens(NamedTuple):
    """The result of loading one block into the sequence of a run."""

    run: Run
    n_tokens: int
    """Number of tokens that the sequence holds after the load."""
    tier: CacheTier
    """The tier that the block came from."""


@dataclass(slots=True)
class OffloadStep:
    """The results of one call of `Offload.step`."""

    loaded: list[LoadedTokens] = field(default_factory=list)
    finished_loads: list[Run] = field(default_factory=list)
    """Runs whose load has ended, because all blocks were loaded or because one block could not be loaded."""
    finished_saves: list[CachedSequence] = field(default_factory=list)
    """Entries whose save has ended. Their cells may be removed, even if a block could not be stored."""


class Offload(Protocol):
    """Saves entries that leave the device, in host memory or on disk, and loads stored prefixes to the device again."""

    @property
    def host_bytes(self) -> int:
        """Host memory used by stored blocks, in bytes."""

    @property
    def disk_bytes(self) -> int:
        """Disk space used by stored blocks, in bytes."""

    @property
    def has_transfers(self) -> bool:
        """Whether a save or a load is not finished."""

    def match(self, tokens: bytes, scope: Scope) -> StoredPrefix | None:
        """Return the longest stored prefix of `tokens` (packed), or None.

        The result is valid until the next `step`. After `start_load` it stays valid until the load ends.
        """

    def start_load(self, run: Run, stored: StoredPrefix) -> None:
        """Start to load the blocks of `stored` that end after the run's `n_past`."""

    def start_save(self, entry: CachedSequence) -> bool:
        """Start to save the cells of the entry that are worth it. Returns False when there are none.

        The entry may then be removed.
        """

    @property
    def can_save_ahead(self) -> bool:
        """Whether `save_ahead` may be called now. False while the disk has much to write."""

    def save_ahead(self, entry: CachedSequence) -> bool:
        """Save one block of the entry, which stays on the device. Returns False if no block is missing or can be saved.

        A later `start_save` then has less to save, or nothing.
        """

    def read_block(self, block: Block) -> Future[SavedCells | None]:
        """Read the data of a block that `match` has just returned. The future gives None if the file is invalid."""

    def discard(self, tokens: bytes, scope: Scope, n_kept: int) -> None:
        """Remove the stored blocks of `tokens` that end after the first `n_kept` tokens.

        Does not remove a block that another stored prefix or another namespace uses.
        """

    def discard_branch(self, tokens: bytes, scope: Scope) -> None:
        """Remove the last stored block of `tokens` with all blocks after it, and the blocks before it that no other
        text continues.
        """

    def cancel_transfers(self, seq_id: int) -> None:
        """Cancel the saves and loads of a sequence that is removed or gets another owner."""

    def step(self, budget_s: float, prefill_token_s: float = 0.0, free_cells: float = inf) -> OffloadStep:
        """Transfer blocks for about `budget_s` seconds. Transfers at least one block, if a block is ready.

        Args:
            budget_s: The time of the transfers, in seconds.
            prefill_token_s: The time in which a token of a prompt is computed. Cells that are saved more slowly are not
                worth it. 0: not known.
            free_cells: Number of cells that no sequence holds. A load ends before a block that needs more of them:
                llama.cpp loads a block as a whole, also if the run needs only some of its tokens. The running jobs need
                the other cells, and the tokens of one block are soon computed.
        """

    def close(self, entries: Iterable[CachedSequence], timeout_s: float) -> None:
        """Write the entries and the blocks in host memory to disk within about `timeout_s`. Then stop all transfers.

        Args:
            entries: The entries on the device, the least recently used first.
            timeout_s: Upper bound on the time, in seconds.
        """

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the stored blocks contradict each other."""


class NoOffload:
    """No storage behind the device: an entry that leaves the device is lost. `Offload` documents the methods."""

    host_bytes: int = 0
    disk_bytes: int = 0
    has_transfers = False
    can_save_ahead = False

    def match(self, tokens: bytes, scope: Scope) -> None:  # noqa: ARG002 - the interface's
        return None

    def start_load(self, run: Run, stored: StoredPrefix) -> None:  # noqa: ARG002 - the interface's
        raise LookupError(f"{stored!r} is not stored")

    def start_save(self, entry: CachedSequence) -> bool:  # noqa: ARG002 - the interface's
        return False

    def save_ahead(self, entry: CachedSequence) -> bool:  # noqa: ARG002 - the interface's
        return False

    def read_block(self, block: Block) -> Future[SavedCells | None]:
        raise LookupError(f"{block!r} is not stored")

    def discard(self, tokens: bytes, scope: Scope, n_kept: int) -> None:
        pass

    def discard_branch(self, tokens: bytes, scope: Scope) -> None:
        pass

    def cancel_transfers(self, seq_id: int) -> None:
        pass

    def step(
        self,
        budget_s: float,  # noqa: ARG002 - the interface's
        prefill_token_s: float = 0.0,  # noqa: ARG002 - the interface's
        free_cells: float = inf,  # noqa: ARG002 - the interface's
    ) -> OffloadStep:
        return OffloadStep()

    def close(self, entries: Iterable[CachedSequence], timeout_s: float) -> None:
        pass

    def check_integrity(self) -> None:
        pass
