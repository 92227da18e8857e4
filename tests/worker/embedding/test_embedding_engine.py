"""Embeddings are those of a plain llama_decode, for each pooling, even when texts share a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from llamaq.common.errors import ErrorCode
from llamaq.common.protocol.embedding_task import EmbeddingTask, Normalization, Pooling
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.worker.core.job import Lease
from llamaq.worker.embedding.embedding_engine import EmbeddingEngine, normalize
from llamaq.worker.embedding.embedding_job import EmbeddingJob, Text, TextBatch, TextResult
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions

TEXTS = ((1, 5, 6, 7), (1, 9), (1, 300, 20, 41, 17, 33, 8, 12), (1, 5, 6, 8))
TOLERANCE = 1e-4
N_BATCH = 64

Rows = npt.NDArray[np.float32]


@contextmanager
def opened(model: Path, pooling: Pooling | None = None) -> Iterator[EmbeddingEngine]:
    options = ContextOptions(
        n_ctx=N_BATCH,
        n_batch=N_BATCH,
        n_ubatch=N_BATCH,
        n_seq_max=8,
        n_threads=1,
        n_threads_batch=1,
        embeddings=True,
        pooling=pooling,
    )
    engine = EmbeddingEngine(Model(model, ModelOptions(for_embeddings=True)), options)
    try:
        yield engine
    finally:
        engine.close()


def job_of(texts: Sequence[tuple[int, ...]], **task: Any) -> EmbeddingJob:
    request = JobRequest(embed=EmbeddingTask(inputs=tuple(texts), **task))
    lease = Lease("q.0." + "0" * 32, 0, Keys().jobs("q", 0, Priority.INTERACTIVE), "1-0", 1)
    return EmbeddingJob(lease, request, tuple(texts))


def run(engine: EmbeddingEngine, texts: Sequence[tuple[int, ...]], **task: Any) -> list[TextResult]:
    job = job_of(texts, **task)
    return engine.run(TextBatch(tuple(Text(job, tokens) for tokens in texts)))


def rows_of(result: TextResult) -> Rows:
    assert result.embedding is not None
    return np.array(result.embedding.vectors, np.float32)


def plain_rows(model: Path, pooling: Pooling, tokens: Sequence[int]) -> Rows:
    """Return what llama.cpp's own functions compute for one text in a context of its own."""
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = N_BATCH
    params.n_threads = params.n_threads_batch = 1
    params.embeddings = True
    params.pooling_type = list(Pooling).index(pooling)
    context = llama_cpp.llama_init_from_model(loaded, params)
    array = (llama_cpp.llama_token * len(tokens))(*tokens)
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
    n_embd = llama_cpp.llama_model_n_embd_out(loaded)
    if pooling is Pooling.NONE:
        values = [llama_cpp.llama_get_embeddings_ith(context, index)[:n_embd] for index in range(len(tokens))]
    else:
        values = [llama_cpp.llama_get_embeddings_seq(context, 0)[: 1 if pooling is Pooling.RANK else n_embd]]
    rows = np.array(values, np.float32)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(loaded)
    return rows


@pytest.fixture(scope="module", autouse=True)
def quiet_llama_cpp() -> Iterator[None]:
    discard = llama_cpp.llama_log_callback(lambda _level, _text, _user_data: None)
    callback, user_data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(user_data))
    llama_cpp.llama_log_set(discard, ctypes.c_void_p())
    yield
    llama_cpp.llama_log_set(callback, user_data)


@pytest.mark.cpu  # on a GPU, rounding depends on the shape of the batch
@pytest.mark.parametrize("pooling", [Pooling.NONE, Pooling.MEAN, Pooling.CLS, Pooling.LAST])
def test_embeddings_in_a_shared_batch_are_those_of_a_plain_decode(demo_model: Path, pooling: Pooling) -> None:
    with opened(demo_model, pooling) as engine:
        together = run(engine, TEXTS, normalization=Normalization.NONE)
        alone = run(engine, TEXTS[2:3], normalization=Normalization.NONE)
    for tokens, result in zip(TEXTS, together, strict=True):
        expected = plain_rows(demo_model, pooling, tokens)
        assert rows_of(result).shape == expected.shape
        assert np.abs(rows_of(result) - expected).max() < TOLERANCE
    assert np.abs(rows_of(alone[0]) - rows_of(together[2])).max() < TOLERANCE


@pytest.mark.cpu  # on a GPU, rounding depends on the shape of the batch
def test_every_kind_of_memory_is_empty_before_each_batch(any_model: Path) -> None:
    with opened(any_model, Pooling.MEAN) as engine:
        run(engine, TEXTS[::-1])
        results = run(engine, TEXTS, normalization=Normalization.NONE)
    for tokens, result in zip(TEXTS[1:3], results[1:3], strict=True):
        assert np.abs(rows_of(result) - plain_rows(any_model, Pooling.MEAN, tokens)).max() < TOLERANCE


def test_a_model_without_memory_reads_texts_in_both_directions(bert_model: Path) -> None:
    with opened(bert_model) as engine:
        assert engine.pooling is Pooling.CLS  # of the file
        first, second = run(engine, [(2, 5, 6, 3), (2, 5, 7, 3)], normalization=Normalization.NONE)
        expected = plain_rows(bert_model, Pooling.CLS, (2, 5, 6, 3))
    assert np.abs(rows_of(first) - expected).max() < TOLERANCE
    assert np.abs(rows_of(first) - rows_of(second)).max() > 0.01  # the first token has seen the third one


def test_a_model_with_a_classification_head_scores_texts(rerank_model: Path) -> None:
    pairs = [(2, 5, 3, 6, 3), (2, 5, 3, 9, 3)]
    with opened(rerank_model) as engine:
        results = run(engine, pairs)
    expected = [plain_rows(rerank_model, Pooling.RANK, pair)[0, 0] for pair in pairs]
    scores = [result.embedding.score for result in results if result.embedding is not None]
    assert scores == pytest.approx(expected, abs=TOLERANCE)


def test_a_shortened_embedding_is_scaled_after_it_was_shortened(demo_model: Path) -> None:
    with opened(demo_model, Pooling.MEAN) as engine:
        whole = rows_of(run(engine, TEXTS[:1], normalization=Normalization.NONE)[0])[0]
        short = rows_of(run(engine, TEXTS[:1], dimensions=8)[0])[0]
    assert short == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=1e-6)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Normalization.NONE, [3.0, -4.0]),
        (Normalization.EUCLIDEAN, [0.6, -0.8]),
        (Normalization.TAXICAB, [3 / 7, -4 / 7]),
        (Normalization.MAX_ABSOLUTE, [24_570.0, -32_760.0]),
    ],
)
def test_vectors_are_scaled_as_llama_cpp_scales_them(how: Normalization, expected: list[float]) -> None:
    assert normalize(np.array([3.0, -4.0], np.float32), how).tolist() == pytest.approx(expected)
    assert normalize(np.zeros(2, np.float32), how).tolist() == [0, 0]


def test_a_text_that_llama_cpp_refuses_fails_alone(demo_model: Path) -> None:
    impossible = (1, -5)
    with opened(demo_model, Pooling.MEAN) as engine:
        results = run(engine, TEXTS[:1])
        job = job_of(TEXTS[:1])
        mixed = engine.run(TextBatch((Text(job, TEXTS[0]), Text(job, impossible))))
    assert mixed[1].error is not None
    assert mixed[1].error.code is ErrorCode.DECODE_FAILED
    assert np.abs(rows_of(mixed[0]) - rows_of(results[0])).max() < TOLERANCE
