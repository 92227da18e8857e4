"""How many tokens a job may have: as many as the model was trained for, or more if RoPE is scaled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamaq.common.protocol import codec
from llamaq.common.protocol.embedding_task import EmbeddingTask
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.tools.random_gguf import PLAIN, write_model
from llamaq.worker.core.job import Lease
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.embedding.embedding_job import EmbeddingJob, Text, TextBatch
from llamaq.worker.process.embedding_parts import EmbeddingParts
from llamaq.worker.process.generation_parts import GenerationParts
from llamaq.worker.process.model_parts_interface import ModelParts
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.settings import load_settings

N_CTX_TRAIN, N_CTX = 64, 256
SCALED: list[dict[str, Any]] = [
    {"rope_scale": 4.0},
    {"rope_freq_scale": 0.25},
    {"rope_scaling": "linear"},
    {"rope_scaling": "yarn", "rope_scale": 4.0},
]
NOT_SCALED: list[dict[str, Any]] = [{}, {"rope_freq_base": 5000.0}, {"rope_scaling": "none"}]
CASES = [*((values, N_CTX) for values in SCALED), *((values, N_CTX_TRAIN) for values in NOT_SCALED)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("limit") / "model.gguf", replace(PLAIN, n_ctx=N_CTX_TRAIN))


def parts_of(model: Path, *, embeddings: bool, **values: Any) -> ModelParts:
    settings = load_settings(
        model=str(model), n_ctx=N_CTX, n_parallel=1, n_threads=1, warmup=False, embeddings=embeddings, **values
    )
    if embeddings:
        return EmbeddingParts(model, settings, "worker")
    return GenerationParts(model, settings, DecodeMaximal(), "worker")


@pytest.mark.starts_processes  # it loads models
@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize(("values", "expected"), CASES, ids=str)
def test_a_job_may_be_longer_than_the_training_context_if_rope_is_scaled(
    model: Path, values: dict[str, Any], expected: int, *, embeddings: bool
) -> None:
    parts = parts_of(model, embeddings=embeddings, **values)
    assert parts.card_fields()["context_limit"] == expected
    parts.close()
    parts.free_model()


@pytest.mark.starts_processes  # it loads models
@pytest.mark.parametrize("values", SCALED, ids=str)
def test_a_model_with_a_vector_for_each_position_reads_no_longer_texts(
    bert_model: Path, values: dict[str, Any]
) -> None:
    """llama.cpp ends the process at a position that has no vector."""
    parts = parts_of(bert_model, embeddings=True, **values)
    assert parts.card_fields()["context_limit"] == N_CTX_TRAIN == parts.engine.model.n_ctx_train
    parts.free_model()


@pytest.mark.starts_processes  # it loads models
def test_a_text_beyond_the_training_context_is_embedded_if_rope_is_scaled(model: Path) -> None:
    parts = parts_of(model, embeddings=True, rope_scale=4.0)
    assert isinstance(parts, EmbeddingParts)
    request = JobRequest(embed=EmbeddingTask(inputs=(tuple(range(5, 5 + N_CTX)),)))
    lease = Lease("q.0." + "0" * 32, 0, Keys().jobs("q", 0, Priority.BULK), "1-0", 1)
    payload = codec.encode_request(request, 100_000)
    job = parts.preparer.prepare(payload, lease, TokenSpan(0, (), 0, ""), JobTimes()).job
    assert isinstance(job, EmbeddingJob)
    (result,) = parts.engine.run(TextBatch((Text(job, job.texts[0]),)))
    assert result.error is None
    parts.free_model()
