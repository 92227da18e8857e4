"""Bodies of requests for embeddings and rankings, and of their answers."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from array import array
from math import inf, nan
from typing import Any

import httpx
import pytest
from pydantic_core import to_json
from tests.support.http_server import serving_http
from tests.support.worker_cards import announce_card

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.embedding_task import Embedding, JobKind, Normalization
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.gateway import embedding_and_rerank_format
from llamaq.gateway.embedding_and_rerank_format import (
    encode_embeddings,
    encode_native_embeddings,
    ranking_object,
    read_embedding_body,
    read_ranking_body,
)
from llamaq.gateway.prepared.embedding import PreparedEmbedding
from llamaq.producer.embed_and_rerank import rank
from llamaq.producer.testing import FakeWorker, fake_embedding

ROWS = array("f", [0.5, -1.0]).tobytes()
TEXT_PART = {"type": "text", "text": "b"}


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ["a"]),
        ("", [""]),
        ([1, 2], [[1, 2]]),
        ([1, "a", 2], [[1, "a", 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1, 2], "a"], [[1, 2], "a"]),
        ({"prompt_string": "a"}, ["a"]),
        ({"content": [{"type": "text", "text": "a"}, TEXT_PART]}, ["ab"]),
        (["a", {"prompt_string": "c"}, {"content": [TEXT_PART]}], ["a", "c", "b"]),
    ],
)
def test_the_input_is_one_text_or_several(given: Any, inputs: list[Any]) -> None:
    assert read_embedding_body({"input": given}).inputs == inputs
    assert read_embedding_body({"content": given}).is_native


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [10**12]}, "input"),
        ({"input": "a", "dimensions": 10**12}, "dimensions"),
        ({"input": [["a", 1.5]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": {"content": "a"}}, "input"),
        ({"input": {"content": []}}, "input"),
        ({"input": {"content": [{"type": "image_url"}]}}, "input"),
        ({"input": {"prompt_string": "a", "multimodal_data": ["b"]}}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "encoding_format": ["hex"]}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": True}, "dimensions"),
        ({"input": "a", "embd_normalize": 3}, "embd_normalize"),
        ({"input": "a", "embd_normalize": []}, "embd_normalize"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{param}[.:]"):
        read_embedding_body(body)


def test_options_are_read() -> None:
    body = read_embedding_body({"input": "a", "encoding_format": "base64", "dimensions": 3, "embd_normalize": -1})
    assert (body.is_base64, body.dimensions, body.normalization) == (True, 3, Normalization.NONE)


def test_an_answer_has_numbers_or_base64_and_the_usage() -> None:
    embeddings = [Embedding(3, 1, ROWS), Embedding(4, 1, ROWS)]
    answer = json.loads(encode_embeddings(embeddings, 'm"', is_base64=False))
    assert (answer["object"], answer["model"]) == ("list", 'm"')
    assert answer["data"][1] == {"object": "embedding", "index": 1, "embedding": [0.5, -1.0]}
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    encoded = json.loads(encode_embeddings(embeddings, "m", is_base64=True))["data"][0]["embedding"]
    assert base64.b64decode(encoded) == ROWS
    native = json.loads(encode_native_embeddings([Embedding(2, 2, ROWS), Embedding(1, 1, ROWS)]))
    assert native == [{"index": 0, "embedding": [[0.5], [-1.0]]}, {"index": 1, "embedding": [[0.5, -1.0]]}]


def test_numbers_that_json_does_not_have_are_refused() -> None:
    wrong = [Embedding(3, 1, array("f", [1.0, value]).tobytes()) for value in (nan, inf, -inf)]
    for each in wrong:
        with pytest.raises(ValueError, match="JSON"):
            encode_embeddings([each], "m", is_base64=False)
        with pytest.raises(ValueError, match="JSON"):
            encode_native_embeddings([each])


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize(("n_inputs", "is_large"), [(1, False), (32, True)])
async def test_large_answers_are_encoded_on_a_thread(
    monkeypatch: pytest.MonkeyPatch, *, n_inputs: int, is_large: bool, is_native: bool
) -> None:
    threads = set()

    def encode(row: bytes) -> bytes:
        threads.add(threading.get_ident())
        return to_json(len(row))

    monkeypatch.setattr(embedding_and_rerank_format, "_encode_vector", encode)
    embeddings = (Embedding(3, 1, bytes(4096)),) * n_inputs
    stats, reason = JobStats(), FinishReason.STOP
    result = Result(job_id="j", text="", tokens=(), embeddings=embeddings, finish_reason=reason, stats=stats, seed=1)
    asked = PreparedEmbedding("m", is_native, is_base64=False, jobs=[])
    answer = json.loads(await asked.answer([result]))
    assert len(answer if is_native else answer["data"]) == n_inputs
    assert asked.usage([result]) == {"prompt_tokens": 3 * n_inputs, "total_tokens": 3 * n_inputs}
    assert len(threads) == 1
    assert (threading.get_ident() not in threads) is is_large


OPTIONS = [
    ({}, {}),
    ({"user": "alice", "seed": 3, "temperature": 0.5}, {"tenant": "alice"}),
    ({"priority": 0, "service_tier": "auto"}, {}),
    ({"priority": 1.0}, {"priority": "bulk"}),
    ({"service_tier": "flex", "timeout_s": 5, "retries": 0}, {"priority": "bulk", "timeout_s": 5, "retries": 0}),
    ({"normalize": True, "add_special_tokens": None, "truncate_prompt_tokens": None}, {}),
]


@pytest.mark.parametrize(("fields", "options"), OPTIONS)
def test_the_jobs_have_the_tenant_and_the_priority_of_the_request(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    assert read_embedding_body({"input": "a", **fields}).options == options
    assert read_ranking_body({"query": "q", "documents": ["a"], **fields}).options == options


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        (JobKind.EMBEDDING, "/v1/embeddings", {"input": "a"}),
        (JobKind.EMBEDDING, "/embedding", {"content": "a"}),
        (JobKind.RERANKING, "/v1/rerank", {"query": "q", "documents": ["a"]}),
    ],
)
async def test_the_options_of_a_request_reach_its_job(
    redis_url: str, queue: str, kind: JobKind, path: str, body: dict[str, Any]
) -> None:
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await announce_card(worker, kind=kind)
        asking = asyncio.create_task(http.post(path, json={**body, "user": "alice", "service_tier": "flex"}))
        attempt = await worker.start_next()
        await attempt.finish(embeddings=[fake_embedding("a")])
        assert (await asking).status_code == 200
    assert (attempt.request.tenant, attempt.request.priority) == ("alice", "bulk")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"normalize": False}, "normalize"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"priority": "late"}, "priority"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{param}:"):
        read_embedding_body({"input": "a", **fields})
    with pytest.raises(InvalidRequest, match=rf"^{param}:"):
        read_ranking_body({"query": "q", "documents": ["a"], **fields})


SCORES = [Embedding(5, 1, array("f", [score]).tobytes()) for score in (0.25, 0.75, -1.0)]


def test_a_ranking_has_the_best_document_first_in_the_form_of_the_request() -> None:
    jina = read_ranking_body(
        {"query": "q", "documents": ["a", {"text": "b"}, "c"], "top_n": 2, "return_documents": True}
    )
    answer = ranking_object(rank(SCORES, jina.top_n), jina, "m", 15)
    assert isinstance(answer, dict)
    assert answer["results"] == [
        {"index": 1, "relevance_score": 0.75, "document": {"text": "b"}},
        {"index": 0, "relevance_score": 0.25, "document": {"text": "a"}},
    ]
    assert answer["usage"]["total_tokens"] == 15
    tei = read_ranking_body({"query": "q", "texts": ["a", "b", "c"], "return_text": True})
    assert ranking_object(rank(SCORES), tei, "m", 15) == [
        {"index": 1, "score": 0.75, "text": "b"},
        {"index": 0, "score": 0.25, "text": "a"},
        {"index": 2, "score": -1.0, "text": "c"},
    ]


def test_a_document_with_a_text_is_ranked_by_it() -> None:
    body = read_ranking_body({"query": "q", "documents": [{"text": "a", "content": None}, {"text": "b", "content": 1}]})
    assert body.documents == ["a", "b"]


def test_a_document_may_be_a_list_of_content_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = read_ranking_body({"query": "q", "documents": [{"content": parts}, "c"], "top_n": 2})
    assert body.documents == ["ab", "c"]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(InvalidRequest, match=r"^documents\.content: parts of the form"):
        read_ranking_body({"query": "q", "documents": [{"content": [image]}]})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": 5, "documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": None}, "documents"),
        ({"query": "q", "documents": 123}, "documents"),
        ({"query": "q", "documents": [1, 2]}, "documents"),
        ({"query": "q", "documents": ["a"] * 2049}, "documents"),
        ({"query": "q", "texts": [{}]}, "texts"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
)
def test_a_wrong_field_of_a_ranking_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{param}:"):
        read_ranking_body(body)
