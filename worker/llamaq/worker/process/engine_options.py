"""How the settings of a worker become options of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions, RopeOptions
from llamaq.worker.settings import WorkerSettings


def load_model(path: Path, settings: WorkerSettings) -> Model:
    """Load the model.

    Raises:
        ModelError: The model cannot be loaded.
    """
    return Model(path, model_options(settings))


def context_options(settings: WorkerSettings, **sizes: Any) -> ContextOptions:
    """Return the options of a context.

    Args:
        settings: The settings of the worker.
        **sizes: The options that depend on what the worker's jobs compute.
    """
    return ContextOptions(
        n_threads=settings.n_threads,
        n_threads_batch=settings.n_threads_batch or settings.n_threads,
        flash_attn=settings.flash_attn,
        swa_full=settings.swa_full,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        kv_offload=settings.kv_offload,
        rope=_rope_options(settings),
        **sizes,
    )


def model_options(settings: WorkerSettings) -> ModelOptions:
    """Return the options of the model."""
    return ModelOptions(
        n_gpu_layers=settings.n_gpu_layers,
        split_mode=settings.split_mode if settings.device is None else "none",
        main_gpu=settings.main_gpu if settings.device is None else settings.device,
        tensor_split=settings.tensor_split,
        override_tensor=settings.override_tensor,
        use_mmap=settings.use_mmap,
        use_mlock=settings.use_mlock,
        numa=settings.numa,
        for_embeddings=settings.embeddings,
    )


def _rope_options(settings: WorkerSettings) -> RopeOptions:
    return RopeOptions(
        scaling=settings.rope_scaling,
        freq_base=settings.rope_freq_base,
        freq_scale=1 / settings.rope_scale if settings.rope_scale else settings.rope_freq_scale,
        orig_ctx=settings.yarn_orig_ctx,
        ext_factor=settings.yarn_ext_factor,
        attn_factor=settings.yarn_attn_factor,
        beta_slow=settings.yarn_beta_slow,
        beta_fast=settings.yarn_beta_fast,
    )
