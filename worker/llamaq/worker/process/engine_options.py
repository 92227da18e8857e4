"""How the settings of a worker become options of llama.cpp."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamaq.worker.engine.gguf_vocab import has_position_table
from llamaq.worker.engine.llama_bindings import LOGIT_BYTES, Model
from llamaq.worker.engine.llama_log import has_gpu
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions, RopeOptions
from llamaq.worker.engine.model_files import resolve_model_file
from llamaq.worker.engine.scaled_file import ScaledFile
from llamaq.worker.engine.thread_pool import ThreadOptions
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


SCORED_BYTES = 64 * 1024 * 1024
"""Largest size of the logits of one tick for `prompt_logprobs`: 110 tokens of a vocabulary of 151,936. llama.cpp
reserves memory for this number of rows, and other streams wait until the engine has read them."""
MIN_SCORED_TOKENS = 16


def n_scored_tokens(n_vocab: int) -> int:
    """Return how many prompt tokens of one tick may have their logits computed for `prompt_logprobs`."""
    return max(MIN_SCORED_TOKENS, SCORED_BYTES // (LOGIT_BYTES * n_vocab))


def computes_on_gpu(settings: WorkerSettings) -> bool:
    """Return whether a GPU computes layers of the model."""
    return settings.n_gpu_layers != 0 and has_gpu()


def load_model(path: Path, settings: WorkerSettings) -> Model:
    """Load the model, its adapters and its control vectors. Files of the hub are downloaded if necessary.

    Raises:
        ModelError: The model, an adapter or a control vector cannot be loaded.
    """
    options = replace(
        model_options(settings),
        lora=_scaled_files(settings.lora_scales, "--lora"),
        control_vectors=_scaled_files(settings.control_vector_scales, "--control-vector"),
        control_vector_layers=settings.control_vector_layer_range,
        override_kv=settings.metadata_overrides,
    )
    return Model(path, options)


def context_limit(path: Path, settings: WorkerSettings, model: Model, n_cells: int) -> int:
    """Return the largest number of tokens of a job: the context that the model was trained on, unless RoPE is scaled.

    Args:
        path: The model file.
        settings: The settings of the worker.
        model: The model of this file.
        n_cells: For how many tokens of a job the worker has room.
    """
    if settings.extends_context and not has_position_table(path):
        return n_cells
    return min(n_cells, model.n_ctx_train)


def _scaled_files(scales: Iterable[tuple[str, float]], setting: str) -> tuple[ScaledFile, ...]:
    return tuple(ScaledFile(resolve_model_file(name, setting), scale) for name, scale in scales)


def context_options(settings: WorkerSettings, **sizes: Any) -> ContextOptions:
    """Return the options of a context.

    Args:
        settings: The settings of the worker.
        **sizes: The options that depend on what the worker's jobs compute.
    """
    return ContextOptions(
        n_threads=settings.n_threads_alone,
        n_threads_batch=settings.n_threads_batch or settings.n_threads_alone,
        threads=ThreadOptions(settings.cpus, settings.cpu_strict, settings.prio, settings.poll),
        flash_attn=settings.flash_attn,
        swa_full=settings.swa_full,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        kv_offload=settings.kv_offload,
        op_offload=settings.op_offload,
        rope=rope_options(settings),
        **sizes,
    )


def fit_to_sliding_window(settings: WorkerSettings, model: Model) -> WorkerSettings:
    """Return the settings with which llama.cpp computes a model with a sliding window correctly. Others are unchanged.

    - A batch is computed in one step. llama.cpp finds the cells of all steps first. A later step may get cells that
      leave the window of a sequence only when an earlier step has added tokens to the sequence. llama.cpp then removes
      all older cells of this sequence before it computes the earlier step, which still needs them
      (`llama_kv_cache::prepare` and `apply_ubatch`).
    - Without `swa_full`, each sequence has its own cells, so that no tokens of other sequences take them.
    """
    if not model.n_swa:
        return settings
    n_step = min(settings.batch_budget, max(settings.ubatch_tokens, 2 * settings.n_parallel + 1))  # slots and guards
    kv_unified = settings.kv_unified and settings.swa_full
    if n_step < settings.batch_budget or kv_unified != settings.kv_unified:
        log.info("model.sliding_window n_batch=%d kv_unified=%s", n_step, kv_unified)
    return settings.model_copy(update={"n_batch": n_step, "n_ubatch": n_step, "kv_unified": kv_unified})


def model_options(settings: WorkerSettings) -> ModelOptions:
    """Return the options of the model and of a draft model. Adapters, control vectors and metadata are not among them:
    they are those of the model alone.
    """
    return ModelOptions(
        n_gpu_layers=settings.n_gpu_layers,
        split_mode=settings.split_mode if settings.device is None else "none",
        main_gpu=settings.main_gpu if settings.device is None else settings.device,
        tensor_split=settings.tensor_split,
        override_tensor=(*settings.override_tensor, *_experts_in_host_memory(settings)),
        repack=settings.repack,
        check_tensors=settings.check_tensors,
        use_mmap=settings.use_mmap,
        use_mlock=settings.use_mlock,
        use_direct_io=settings.use_direct_io,
        lazy_mode=settings.lazy_mode,
        numa=settings.numa,
        for_embeddings=settings.embeddings,
    )


def _experts_in_host_memory(settings: WorkerSettings) -> list[str]:
    """Return the overrides that store experts in host memory, with the expressions of llama.cpp's own programs
    (`LLM_FFN_EXPS_REGEX` in its common/common.h).
    """
    layers = [""] if settings.cpu_moe else [rf"blk\.{layer}" for layer in range(settings.n_cpu_moe)]
    return [rf"{layer}\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU" for layer in layers]


def rope_options(settings: WorkerSettings) -> RopeOptions:
    """Return how positions are scaled. Two settings with the same effect, such as a scale and its inverse, are one."""
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
