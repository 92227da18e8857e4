"""Builds the prefix cache, its offload tiers and the folder of saved slots from the settings."""

from __future__ import annotations

from pathlib import Path

from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import MAX_SEQUENCES, Model
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.offload_interface import NoOffload, Offload
from llamaq.worker.kv_cache.prefix_cache_interface import NullPrefixCache, PrefixCache
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BLOCK_TOKENS, BlockTransfers
from llamaq.worker.offload.disk_block_files import DiskBlockFiles
from llamaq.worker.offload.host_arena import HostArena
from llamaq.worker.offload.old_cache_folders import erase_old_blocks
from llamaq.worker.offload.save_costs import SaveCosts
from llamaq.worker.process.cache_fingerprint import fingerprint
from llamaq.worker.process.engine_options import computes_on_gpu
from llamaq.worker.settings import WorkerSettings
from llamaq.worker.slot_files.saved_slot_files import SavedSlotFiles

CACHED_SEQUENCES = 64
"""Default number of cached sequences in a unified KV cache. Each further sequence costs no time, only address space:
8 bytes for each token of the vocabulary. With a GPU, half of this is memory."""
CACHED_STATES_PER_SLOT = 3
"""Default number of cached sequences for each slot of a recurrent model. llama.cpp allocates a whole state for every
sequence of such a model, also for an unused sequence."""
SCRATCH_SEQUENCES = 1
"""Number of sequences that the engine uses internally."""
MIB = 2**20
HELD_CELLS_DIVISOR = 4
"""By default cached sequences hold at most a quarter of all cells while jobs run."""
MAX_HELD_CELLS = 256
"""Default upper bound on idle cells while jobs run, if the model runs on the CPU and they are saved whole or not at
all. Measured with 8 decoding jobs and 512 held cells: a tick takes 1.02 times as long with a model of 0.6 B parameters,
and 1.07 times as long with 2.6 M parameters. Prefill takes at most 1.10 times as long. With 2,048 held cells, ticks and
prefill take 1.08 to 1.45 times as long. Loading 512 tokens from host memory takes a tenth of the time of such a tick.
"""


def choose_n_sequences(settings: WorkerSettings, model: Model) -> int:
    """Return the number of sequences of the llama.cpp context: for the slots, the cached sequences and the engine.

    In a unified KV cache a further sequence costs little. In other KV caches even an empty sequence takes memory.
    """
    n_scratch = SCRATCH_SEQUENCES if settings.kv_unified and settings.cache_prompt else 0
    n_wanted = settings.n_parallel + _choose_n_cached(settings, model)
    n_max = min(MAX_SEQUENCES, settings.batch_budget)
    if model.n_swa and n_scratch:
        n_wanted *= 2  # each sequence has a guard, see `SwaGuards`
        has_room = (n_max - n_scratch) // 2 >= settings.n_parallel
        return min(n_max, n_wanted + n_scratch) if has_room else settings.n_parallel
    return max(settings.n_parallel, min(n_max, n_wanted + n_scratch))


def _choose_n_cached(settings: WorkerSettings, model: Model) -> int:
    """Return how many sequences the prefix cache gets."""
    if not settings.cache_prompt:
        return 0
    if settings.cache_sequences is not None:
        return settings.cache_sequences
    if model.is_recurrent:
        return CACHED_STATES_PER_SLOT * settings.n_parallel
    if model.n_swa:
        return CACHED_SEQUENCES // 2 if settings.kv_unified else 0  # each has a guard
    return CACHED_SEQUENCES if settings.kv_unified else 0


def choose_held_cells(settings: WorkerSettings, engine: Engine) -> int:
    """Return how many cells cached sequences may hold while jobs run.

    On a CPU, loading cells again takes less time than keeping them on the device: attention also scans the free cells
    between used ones, so idle cells lengthen its range.
    """
    return _held_cells(settings, engine, 0 if engine.sequences.can_save_parts else MAX_HELD_CELLS)


def choose_held_draft_cells(settings: WorkerSettings, engine: Engine) -> int:
    """Return how many cells of a draft model may be idle. They are never saved, so the draft model would have to
    compute them again.
    """
    return _held_cells(settings, engine, MAX_HELD_CELLS)


def _held_cells(settings: WorkerSettings, engine: Engine, max_on_cpu: int) -> int:
    if settings.held_cells is not None:
        return settings.held_cells
    n_cells = engine.context.n_ctx // HELD_CELLS_DIVISOR
    return min(n_cells, max_on_cpu) if settings.cache_ram_mb and not computes_on_gpu(settings) else n_cells


def make_prefix_cache(settings: WorkerSettings, engine: Engine) -> PrefixCache:
    """Return the prefix cache of the device."""
    return RadixPrefixCache(can_cut=engine.sequences.can_cut) if settings.cache_prompt else NullPrefixCache()


def make_offload(settings: WorkerSettings, engine: Engine, model: Path) -> Offload:
    """Return the offload tiers: host memory, disk, both or none, as the settings select.

    Raises:
        InvalidSettings: `--cache-dir` cannot be used.
    """
    if not settings.cache_prompt or (not settings.cache_ram_mb and settings.cache_dir is None):
        return NoOffload()
    sequences = engine.sequences
    host_bytes = settings.cache_ram_mb * MIB
    disk_bytes = settings.cache_disk_mb * MIB if settings.cache_dir is not None else 0
    block_tokens = BLOCK_TOKENS if sequences.can_save_parts else None
    store = BlockStore(block_tokens, host_bytes, disk_bytes, can_cut=sequences.can_cut_saved)
    arena = HostArena(host_bytes, BLOCK_TOKENS) if host_bytes and sequences.can_save_parts else None
    files = None
    if settings.cache_dir is not None:
        files = DiskBlockFiles(settings.cache_dir, fingerprint(model, settings, engine), max_file_bytes=disk_bytes)
        files.rebuild(store)
        erase_old_blocks(settings.cache_dir, disk_bytes)
    costs = SaveCosts() if computes_on_gpu(settings) else None
    return BlockTransfers(store, sequences, files, arena, costs)


def make_saved_slot_files(settings: WorkerSettings, engine: Engine, model: Path) -> SavedSlotFiles | None:
    """Return the folder of saved slots. None without a cache folder or without a prefix cache."""
    if settings.cache_dir is None or not settings.cache_prompt:
        return None
    max_bytes = max(settings.cache_ram_mb, settings.cache_disk_mb) * MIB
    return SavedSlotFiles(settings.cache_dir, fingerprint(model, settings, engine), max_file_bytes=max_bytes)
