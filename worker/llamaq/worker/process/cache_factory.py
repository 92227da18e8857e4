"""Which prefix cache these settings ask for: how many sequences it gets, and the tiers behind the device."""

from __future__ import annotations

from pathlib import Path

from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import MAX_SEQUENCES, Model, has_gpu
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.offload_interface import NoOffload, Offload
from llamaq.worker.kv_cache.prefix_cache import NullPrefixCache, PrefixCache, RadixPrefixCache
from llamaq.worker.offload.block_transfers import BLOCK_TOKENS, BlockTransfers
from llamaq.worker.offload.disk_store import DiskStore
from llamaq.worker.offload.host_arena import HostArena
from llamaq.worker.process.cache_fingerprint import fingerprint
from llamaq.worker.settings import WorkerSettings
from llamaq.worker.slot_files.saved_files import SavedSlots

KEPT_SEQUENCES = 64
"""Kept sequences in one pool of cells. More cost no time, but buffers of 8 bytes for each token of the vocabulary."""
STATES_PER_SLOT = 3
"""Kept states for each slot where every sequence has memory of its own for one, whether it is used or not."""
SCRATCH_SEQUENCES = 1
"""What the engine keeps for itself."""
MIB = 2**20
HELD_SHARE = 4
"""No more than a quarter of all cells are held by kept sequences by default,"""
HELD_CELLS = 256
"""and no more than these where the next tier is near. Measured on a CPU with 8 jobs decoding: 512 held cells make a
tick 1.02 times (0.6 B parameters) to 1.07 times (2.6 M) as long, and prefill 1.10 times at most; 2,048 make them 1.08
to 1.45 times as long. To load 512 tokens from host memory takes a tenth of such a tick."""


def choose_n_sequences(settings: WorkerSettings, model: Model) -> int:
    """How many sequences the context is made with: for the slots, the prefix cache and the engine.

    In one pool of cells a sequence more costs little. Where each has a stream or a state of its own, it takes memory
    even when it is empty.
    """
    if not settings.cache_prompt:
        n_kept = 0
    elif settings.cache_sequences is not None:
        n_kept = settings.cache_sequences
    elif model.is_recurrent:
        n_kept = STATES_PER_SLOT * settings.n_parallel
    else:
        n_kept = KEPT_SEQUENCES if settings.kv_unified else 0
    n_scratch = SCRATCH_SEQUENCES if settings.kv_unified and settings.cache_prompt else 0
    most = min(MAX_SEQUENCES, settings.batch_budget)
    return max(settings.n_parallel, min(most, settings.n_parallel + n_kept + n_scratch))


def make_prefix_cache(settings: WorkerSettings, engine: Engine, model: Path) -> tuple[PrefixCache, Offload]:
    """The cache and its tiers; raises `InvalidSettings` when `--cache-dir` cannot be used."""
    if not settings.cache_prompt:
        return NullPrefixCache(), NoOffload()
    return RadixPrefixCache(can_cut=engine.sequences.can_cut), _make_tiers(settings, engine, model)


def _make_tiers(settings: WorkerSettings, engine: Engine, model: Path) -> Offload:
    if not settings.cache_ram_mb and settings.cache_dir is None:
        return NoOffload()
    ram_bytes, disk_bytes = settings.cache_ram_mb * MIB, settings.cache_disk_mb * MIB
    block_tokens = BLOCK_TOKENS if engine.sequences.in_blocks else None
    memory = HostArena(ram_bytes, BLOCK_TOKENS) if ram_bytes and engine.sequences.in_blocks else None
    if settings.cache_dir is None:
        return BlockTransfers(
            BlockStore(block_tokens, ram_bytes, can_cut=engine.sequences.can_cut), engine.sequences, memory=memory
        )
    tree = BlockStore(block_tokens, ram_bytes, disk_bytes, can_cut=engine.sequences.can_cut)
    files = DiskStore(settings.cache_dir, fingerprint(model, settings, engine), max_file_bytes=disk_bytes)
    files.restore(tree)
    return BlockTransfers(tree, engine.sequences, files, memory)


def make_saved_slots(settings: WorkerSettings, engine: Engine, model: Path) -> SavedSlots | None:
    """Where the states of slots are saved by name; None where they are not."""
    if settings.cache_dir is None or not settings.cache_prompt:
        return None
    max_bytes = max(settings.cache_ram_mb, settings.cache_disk_mb) * MIB
    return SavedSlots(settings.cache_dir, fingerprint(model, settings, engine), max_file_bytes=max_bytes)


def held_cells(settings: WorkerSettings, engine: Engine) -> int:
    """How many cells kept sequences may hold beside running jobs."""
    if settings.held_cells is not None:
        return settings.held_cells
    most = engine.context.n_ctx // HELD_SHARE
    is_next_tier_near = settings.cache_ram_mb and not (settings.n_gpu_layers and has_gpu())
    return min(most, HELD_CELLS) if is_next_tier_near else most
