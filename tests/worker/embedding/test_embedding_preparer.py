"""Requests of embedding jobs become tokens, or are refused with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.embedding_task import EmbeddingTask, Pooling
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.core.job import Lease
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.embedding.embedding_job import EmbeddingJob
from llamaq.worker.embedding.embedding_preparer import EmbeddingPreparer
from llamaq.worker.embedding.rerank_prompt import encode_pair
from llamaq.worker.engine.gguf_vocab import extract_vocab, has_classifier

HELLO = [2, 5, 6, 3]
"""The tokens of "hello world" between CLS and SEP."""


@pytest.fixture(scope="module")
def bert_vocab(bert_model: Path) -> Vocab:
    return Vocab.from_blob(extract_vocab(bert_model))


def prepare(vocab: Vocab, request: JobRequest, pooling: Pooling = Pooling.CLS, n_embd: int = 64) -> EmbeddingJob:
    preparer = EmbeddingPreparer(vocab, pooling=pooling, n_embd=n_embd, max_tokens=16, max_request_bytes=100_000)
    lease = Lease("q.0." + "0" * 32, 0, Keys().jobs("q", 0, Priority.BULK), "1-0", 1)
    payload = codec.encode_request(request, 100_000)
    job = preparer.prepare(payload, lease, TokenSpan(0, (), 0, ""), JobTimes()).job
    assert isinstance(job, EmbeddingJob)
    return job


def task(*inputs: Any, **fields: Any) -> JobRequest:
    return JobRequest(embed=EmbeddingTask(inputs=inputs, **fields))


def test_a_text_stands_between_the_special_tokens_of_the_model_and_token_ids_stay_as_they_are(
    bert_vocab: Vocab,
) -> None:
    job = prepare(bert_vocab, task("hello world", (7, 8), "", "[SEP] hello"))
    assert [list(text) for text in job.texts] == [HELLO, [7, 8], [2, 3], [2, 3, 5, 3]]
    assert job.request.priority is Priority.BULK  # that of its stream


def test_a_query_and_a_document_are_separated_as_the_model_expects(bert_vocab: Vocab) -> None:
    job = prepare(bert_vocab, task("world", "world world", query="hello"), Pooling.RANK)
    assert [list(text) for text in job.texts] == [[2, 5, 3, 6], [2, 5, 3, 6, 6]]
    bert_vocab.rerank_template = "[CLS]{query} the {document}[SEP]"
    try:
        the = bert_vocab.encode_part("the")
        assert encode_pair(bert_vocab, "hello", "{query} world") == [
            2,
            5,
            *the,
            *bert_vocab.encode_part("{query} world"),
            3,
        ]
        assert 3 not in encode_pair(bert_vocab, "hello", "[SEP]")[:-1]
    finally:
        bert_vocab.rerank_template = None


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (task("hello " * 20), ErrorCode.PROMPT_TOO_LONG, r"inputs\[0\]: 22 tokens are too large.*--n-ubatch"),
        (task("hello", (7,) * 17), ErrorCode.PROMPT_TOO_LONG, r"inputs\[1\]: 17 tokens are too large"),
        (task("x" * 10_000), ErrorCode.PROMPT_TOO_LONG, r"inputs\[0\]: .*too large"),
        (task((7, 1_000_000)), ErrorCode.INVALID_TOKEN, r"inputs\[0\]: token id 1000000"),
        (task("hello", dimensions=65), ErrorCode.INVALID_REQUEST, "dimensions: 65, but .* has 64"),
        (task("hello", query="world"), ErrorCode.INVALID_REQUEST, "runs embedding jobs .* for reranking"),
        (JobRequest(prompt="hello", seed=1), ErrorCode.INVALID_REQUEST, "runs embedding jobs .* for generation"),
    ],
)
def test_a_job_that_cannot_run_is_refused_with_the_way_out(
    bert_vocab: Vocab, request_: JobRequest, code: ErrorCode, message: str
) -> None:
    with pytest.raises(JobRejected, match=message) as caught:
        prepare(bert_vocab, request_)
    assert caught.value.code is code


def test_embeddings_of_one_job_are_bounded(bert_vocab: Vocab) -> None:
    with pytest.raises(JobRejected, match="inputs: their embeddings have 33556480 bytes"):
        prepare(bert_vocab, task(*[(7,) * 16] * 16), Pooling.NONE, n_embd=32_770)
    assert prepare(bert_vocab, task(*[(7,) * 16] * 16), Pooling.MEAN, n_embd=32_770).n_tokens == 256


def test_a_model_has_a_classification_head_or_none(bert_model: Path, rerank_model: Path, demo_model: Path) -> None:
    assert [has_classifier(path) for path in (bert_model, rerank_model, demo_model)] == [False, True, False]
