"""The warm-up: a worker computes a token before it is ready, unless its settings say otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.llama_calls import recorded_batches

from llamaq.worker.process.embedding_parts import EmbeddingParts
from llamaq.worker.process.generation_parts import GenerationParts
from llamaq.worker.process.model_parts_interface import ModelParts
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.settings import load_settings


@pytest.mark.parametrize(("value", "batches"), [(None, [1]), ("true", [1]), ("false", [])])
@pytest.mark.parametrize("embeddings", [False, True])
def test_a_worker_computes_one_token_before_it_is_ready_if_it_warms_up(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, batches: list[int], *, embeddings: bool
) -> None:
    if value is not None:
        monkeypatch.setenv("LLAMAQ_WARMUP", value)
    settings = load_settings(n_ctx=64, n_threads=1, embeddings=embeddings)
    parts: ModelParts
    with recorded_batches() as decoded:
        if embeddings:
            parts = EmbeddingParts(chat_model, settings, "w")
        else:
            parts = GenerationParts(chat_model, settings, DecodeMaximal(), "w")
    assert decoded == batches
    parts.close()
    parts.free_model()
