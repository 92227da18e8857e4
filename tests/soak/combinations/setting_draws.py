"""Draws the model and the settings of workers: many settings differ from their defaults at the same time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.control_vector_files import draw_directions, write_control_vector
from tests.support.lora_files import write_lora

from llamaq.common.errors import InvalidSettings
from llamaq.tools.random_gguf import CHATML, EXPERTS, Architecture, ModelSpec, write_model
from llamaq.worker.settings import WorkerSettings, load_settings

N_CTX_TRAIN = 1024
PLAIN = ModelSpec(Architecture.LLAMA, n_layers=3, n_silent_layers=1, n_ctx=N_CTX_TRAIN, chat_template=CHATML)
"""Its silent layer makes a model without this layer a draft model that is always right."""
SPECS = {
    "llama": PLAIN,
    "qwen3": replace(PLAIN, architecture=Architecture.QWEN3, n_heads=4),
    "experts": replace(EXPERTS, n_layers=3, n_ctx=N_CTX_TRAIN, chat_template=CHATML),
    "gemma3": replace(PLAIN, architecture=Architecture.GEMMA3, n_swa=32),
    "mamba": replace(PLAIN, architecture=Architecture.MAMBA, n_silent_layers=0),
    "jamba": replace(PLAIN, architecture=Architecture.JAMBA, n_silent_layers=0),
    "counting": replace(PLAIN, architecture=Architecture.QWEN3, n_silent_layers=0, counts=True),
    "sampling": replace(PLAIN, sampling=(("temp", "0.6"), ("top_k", "20"), ("penalty_repeat", "1.1"))),
}
LORA_KINDS = ("llama", "qwen3")
RECURRENT_KINDS = ("mamba", "jamba")
LORA_STRENGTH = 0.3
"""A stronger random adapter makes attention so sharp that the noise of one cell changes all later logits."""
MODEL_SETTINGS = (
    "n_ctx",
    "cache_type_k",
    "cache_type_v",
    "flash_attn",
    "swa_full",
    "lora",
    "control_vector",
    "control_vector_layer_range",
    "model_sampling",
)
"""The settings that change logits or the ends of jobs. The next worker of a job must have the same."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class ModelFiles:
    """The files of one kind of model."""

    kind: str
    model: Path
    drafts: tuple[Path, ...]
    """Draft models: one that is always right, and one that is mostly wrong."""
    lora: tuple[Path, ...]
    """Adapters."""
    control_vectors: tuple[Path, ...]
    """Control vectors for all layers that can be changed."""


def write_model_files(folder: Path, kind: str) -> ModelFiles:
    """Write the files of one kind of model. Files that exist are used again."""
    spec = SPECS[kind]
    model = _write(folder / f"{kind}.gguf", spec, seed=1)
    drafts: tuple[Path, ...] = ()
    if kind not in RECURRENT_KINDS:
        small = replace(spec, n_layers=spec.n_layers - spec.n_silent_layers, n_silent_layers=0)
        drafts = tuple(_write(folder / f"{kind}-draft-{seed}.gguf", small, seed) for seed in (1, 2))
    lora = tuple(folder / f"{kind}-lora-{seed}.gguf" for seed in (3, 4) if kind in LORA_KINDS)
    for seed, path in enumerate(lora):
        if not path.exists():
            write_lora(path, model, seed=seed, strength=LORA_STRENGTH)
    vectors = tuple(folder / f"{kind}-vector-{seed}.gguf" for seed in (5, 6))
    for seed, path in enumerate(vectors):
        if not path.exists():
            write_control_vector(path, draw_directions(model, *range(1, spec.n_layers), seed=seed))
    return ModelFiles(kind, model, drafts, lora, vectors)


def _write(path: Path, spec: ModelSpec, seed: int) -> Path:
    return path if path.exists() else write_model(path, spec, seed=seed)


def draw_settings(rng: random.Random, files: ModelFiles, cache_dir: Path, fixed: Settings | None = None) -> Settings:
    """Return settings that `WorkerSettings` accepts. The model may still refuse them.

    Args:
        rng: Makes the choices.
        files: The model.
        cache_dir: The folder of all workers of a round.
        fixed: The settings of the first worker of the round. The drawn ones have its `MODEL_SETTINGS`.
    """
    while True:
        drawn = _Draw(rng).settings(files, cache_dir)
        if fixed is not None:
            drawn = {name: value for name, value in drawn.items() if name not in MODEL_SETTINGS}
            drawn |= {name: value for name, value in fixed.items() if name in MODEL_SETTINGS}
        try:
            load_settings(**drawn)
        except InvalidSettings:
            continue  # settings that exclude each other
        return drawn


def reference_settings(settings: Settings) -> WorkerSettings:
    """Return the settings of a plain worker with the same logits: one slot, no prefix cache, no speculation."""
    same = {name: value for name, value in settings.items() if name in MODEL_SETTINGS}
    return load_settings(**same | {"n_ctx": N_CTX_TRAIN, "n_parallel": 1, "n_threads": 1, "cache_prompt": False})


@dataclass
class _Draw:
    rng: random.Random

    def settings(self, files: ModelFiles, cache_dir: Path) -> Settings:
        n_parallel, n_ctx = self.rng.choice([1, 2, 3, 4, 8]), self.rng.choice([64, 128, 192, 256, 512, 1024])
        chosen = {"n_parallel": n_parallel, "n_ctx": n_ctx, "n_threads": 1}
        chosen |= self._batches(n_ctx) | self._memory(files) | self._tokens_ahead(files) | self._cache(cache_dir)
        chosen |= self._control_vectors(files)
        return chosen

    def _some(self, choices: dict[str, tuple[float, Sequence[Any]]]) -> Settings:
        """Return a random value for some of the names. Each name has a probability and its possible values."""
        drawn = {}
        for name, (probability, values) in choices.items():
            if self.rng.random() < probability:
                drawn[name] = self.rng.choice(values)
        return drawn

    def _batches(self, n_ctx: int) -> Settings:
        return self._some({
            "n_batch": (0.5, [8, 16, 32, 64, n_ctx]),
            "n_ubatch": (0.4, [1, 4, 8, 16, 32, 64]),
            "chunk_size": (0.7, [1, 3, 8, 16, 32, 64]),
            "batch_strategy": (0.6, ["prefill-priority", "balanced", "latency-target"]),
            "cell_margin": (0.6, [1, 4, 16, 200]),
            "stream_interval_ms": (0.4, [0, 1, 50]),
            "inbox_window": (0.3, [0, 8]),
            "bulk_share": (0.4, [0, 0.5, 1]),
            "warmup": (0.3, [False]),
        })  # fmt: skip

    def _memory(self, files: ModelFiles) -> Settings:
        return self._some({
            "cache_type_k": (0.3, ["f32", "bf16", "q8_0"]),
            "cache_type_v": (0.3, ["f32", "bf16", "q8_0"]),
            "flash_attn": (0.5, ["on", "off"]),
            "swa_full": (0.3 if files.kind == "gemma3" else 0, [False]),
            "kv_unified": (0.25, [False]),
            "lora": (0.4 if files.lora else 0, _adapters(files.lora)),
            "model_sampling": (0.2, [False]),
        })  # fmt: skip

    def _control_vectors(self, files: ModelFiles) -> Settings:
        chosen = self._some({"control_vector": (0.3, _vectors(files.control_vectors))})
        return chosen | self._some({"control_vector_layer_range": (0.4 if chosen else 0, [(1, 1), (2, 2), (1, 9)])})

    def _tokens_ahead(self, files: ModelFiles) -> Settings:
        what = self.rng.choice(["off", "backend", "ngram", "model"] if files.drafts else ["off", "backend"])
        if what in ("off", "backend"):
            return {"backend_sampling": what == "backend"}
        chosen = {"speculation": what} | self._some({"draft_max": (0.5, [1, 2, 4, 16, 64])})
        if what == "model":
            chosen["model_draft"] = str(self.rng.choice(files.drafts))
            chosen |= self._some({"draft_p_min": (0.3, [0.1, 0.5])})
        return chosen

    def _cache(self, cache_dir: Path) -> Settings:
        return self._some({
            "cache_prompt": (0.1, [False]),
            "cache_sequences": (0.5, [0, 1, 2, 4, 16, 64]),
            "held_cells": (0.5, [0, 16, 64, 10_000]),
            "cache_ram_mb": (0.5, [0, 1, 2]),
            "cache_dir": (0.5, [cache_dir]),
            "cache_disk_mb": (0.3, [0, 1, 2]),
            "slot_prompt_similarity": (0.2, [0, 0.5, 1]),
        })  # fmt: skip


def _adapters(files: Sequence[Path]) -> list[tuple[str, ...]]:
    """Return values of the setting `lora`: one adapter or several, with other scales."""
    if not files:
        return [()]
    first, second = files
    return [(str(first),), (f"{first}:0.5",), (str(first), f"{second}:0"), (f"{first}:0", f"{second}:0")]


def _vectors(files: Sequence[Path]) -> list[tuple[str, ...]]:
    """Return values of the setting `control_vector`: one vector or two, with other scales."""
    first, second = files
    return [(str(first),), (f"{first}:-0.5",), (f"{first}:0.5", f"{second}:0.3"), (f"{second}:0",)]
