"""The fingerprint of saved KV state. It identifies the model's files, the memory kind, the settings and llama.cpp.

llama.cpp loads any state whose shape fits. The fingerprint prevents it from loading the state of another model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.gguf_vocab import has_long_rope_factors
from llamaq.worker.engine.llama_bindings import LLAMA_CPP_PYTHON_VERSION
from llamaq.worker.engine.model_files import files_of_model
from llamaq.worker.model_settings import UNQUANTIZED_TYPES, RopeSettings
from llamaq.worker.offload.atomic_files import make_private_folder
from llamaq.worker.process.engine_options import computes_on_gpu
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

FORMAT = 2
"""Increased when the meaning of saved data changes."""
MODEL_HASHES = "models"
"""Name of the folder with the known hashes of model files, in the cache folder."""


def fingerprint(path: Path, settings: WorkerSettings, engine: Engine) -> str:
    """Return the fingerprint as text. Workers may exchange saved state only if their fingerprints are equal."""
    parts = {
        "format": FORMAT,
        "model": "+".join(_file_hash(each, settings.cache_dir) for each in files_of_model(path)),
        "llama.cpp": LLAMA_CPP_PYTHON_VERSION,
        "memory": [engine.sequences.can_save_parts, engine.sequences.can_cut, engine.context.kv_unified],
        "gpu_layers": computes_on_gpu(settings),
        "layout": [_attention_layout(settings), settings.cache_type_k, settings.cache_type_v, settings.swa_full],
        # RoPE is part of the keys.
        "rope": [getattr(settings, name) for name in RopeSettings.model_fields],
        "salt": settings.cache_salt,
    }
    model = engine.model.options
    for name, files in (("lora", model.lora), ("control_vectors", model.control_vectors)):
        if files:
            parts[name] = [[_file_hash(each.path, settings.cache_dir), each.scale] for each in files]
    if model.control_vector_layers:
        parts["control_vector_layers"] = model.control_vector_layers
    if settings.override_kv:
        parts["override_kv"] = settings.override_kv
    if not engine.context.kv_unified and not engine.model.is_purely_recurrent:
        # llama.cpp loads the state only into a context with the same number of streams.
        parts["streams"] = engine.context.n_seq_max
    if _has_long_context(path, engine):
        parts["rope_factors"] = "long"
    if rotation := _unrotated_quants(settings):
        parts["LLAMA_ATTN_ROT_DISABLE"] = rotation
    return json.dumps(parts, sort_keys=True)


def _attention_layout(settings: WorkerSettings) -> str:
    """Return the value of `flash_attn` that stands for all values with the same cells.

    Without flash attention V is stored transposed, and llama.cpp does not load such state into cells of the other
    layout. With `auto`, V is never transposed: llama.cpp creates the cells before it finds out whether the device has
    flash attention (`llama_context::llama_context`). No function of llama.cpp returns what it has found. If the device
    has none, the cells differ from those of `on` by rounding alone.
    """
    return "off" if settings.flash_attn == "off" else "auto"


def _unrotated_quants(settings: WorkerSettings) -> str | None:
    """Return the environment variable with which llama.cpp does not rotate keys and values of a quantized type.

    Without it, llama.cpp rotates them before it stores them (`llama_kv_cache::llama_kv_cache`). None: the variable is
    not set, or it changes no cells, because neither type is quantized.
    """
    if {settings.cache_type_k, settings.cache_type_v} <= UNQUANTIZED_TYPES:
        return None
    return os.environ.get("LLAMA_ATTN_ROT_DISABLE")


def _has_long_context(path: Path, engine: Engine) -> bool:
    """Return whether the context is longer than the one that the model was first trained with.

    For such a context, llama.cpp takes the other one of the two sets of RoPE factors that some models have
    (`llama_model::get_rope_factors`). If the file does not name that first context, llama.cpp compares with the
    training context (`llama_model::load_hparams`).
    """
    architecture = engine.model.metadata("general.architecture")
    key = f"{architecture}.rope.scaling.original_context_length"
    # Of several overrides of a key, llama.cpp takes the first one.
    overrides = {override.key: override.value for override in reversed(engine.model.options.override_kv)}
    original = overrides.get(key, engine.model.metadata(key))  # `metadata` returns the value of the file
    n_cells = engine.context.cells_per_sequence
    if original is None:  # most models have no such factors; workers with any context then share saved state
        return n_cells > engine.model.n_ctx_train and has_long_rope_factors(path)
    return n_cells > int(original)


def _file_hash(path: Path, cache_dir: Path | None) -> str:
    """Return the hash of the whole file.

    Reading a large model takes seconds. The hash is therefore saved in `cache_dir`, with the path, size, modification
    time and inode of the file.
    """
    stat = path.stat()
    identity = [os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    if cache_dir is None:
        return _hash_contents(path)
    folder = cache_dir / MODEL_HASHES
    hash_file = folder / f"{hashlib.blake2b(str(identity[0]).encode(), digest_size=16).hexdigest()}.json"
    try:
        known = json.loads(hash_file.read_text())
        if known["identity"] == identity and isinstance(known["hash"], str):
            return str(known["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        log.info("cache.hashing_model file=%s bytes=%d", path.name, stat.st_size)
    digest = _hash_contents(path)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private_folder(folder)
        hash_file.write_text(json.dumps({"identity": identity, "hash": digest}))
    except OSError as exc:
        log.warning("cache.hash_not_saved error=%s", exc)
    return digest


def _hash_contents(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
