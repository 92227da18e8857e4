"""Embedding jobs and their results on the wire."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from pydantic import ValidationError

from llamaq.common.errors import InvalidRequest, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.embedding_task import Embedding, EmbeddingTask, JobKind
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.common.protocol.job_request import EMBEDDING_OPTIONS, JobParams, JobRequest

ROWS = array("f", [0.5, -1.0, 2.0, 4.0]).tobytes()


def test_a_request_is_decoded_as_it_was_encoded() -> None:
    request = JobRequest(embed=EmbeddingTask(inputs=("a", (1, 2)), dimensions=3), tenant="t", metadata={"a": 1})
    assert codec.decode_request(codec.encode_request(request, 1000), 1000) == request
    assert request.kind is JobKind.EMBEDDING
    assert JobRequest(embed=EmbeddingTask(inputs=("a",), query="b")).kind is JobKind.RERANKING
    assert JobRequest(prompt="a").kind is JobKind.GENERATION


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"embed": {"inputs": ["a"]}, "temperature": 0.5}, "temperature"),
        ({"embed": {"inputs": ["a"]}, "prompt": "b"}, "prompt"),
        ({"embed": {"inputs": []}}, "inputs"),
        ({"embed": {"inputs": [[]]}}, "inputs"),
        ({"embed": {"inputs": ["a"] * 257}}, "inputs"),
        ({"embed": {"inputs": [[-1]]}}, "inputs"),
        ({"embed": {"inputs": [[1]], "query": "b"}}, "documents for a query must be texts"),
        ({"embed": {"inputs": ["a"], "dimensions": 0}}, "dimensions"),
        ({"embed": {"inputs": ["a"], "normalization": "no"}}, "normalization"),
        ({"embed": {"inputs": ["a"], "pooling": "cls"}}, "pooling"),
    ],
)
def test_a_wrong_request_is_refused_and_its_field_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        codec.build_request(values)


def test_every_option_of_an_embedding_job_is_an_option_of_a_job() -> None:
    assert set(JobParams.model_fields) | {"has_random_seed"} >= EMBEDDING_OPTIONS


def test_embeddings_are_decoded_as_they_were_encoded() -> None:
    embeddings = (Embedding(3, 1, ROWS), Embedding(2, 2, ROWS))
    data = codec.encode_embeddings(embeddings)
    assert codec.decode_embeddings(data) == embeddings
    assert codec.decode_output(data).text == ""
    assert codec.decode_embeddings(codec.encode_output("text", [1])) is None
    assert embeddings[0].vector == [0.5, -1.0, 2.0, 4.0]
    assert embeddings[1].vectors == [[0.5, -1.0], [2.0, 4.0]]
    assert embeddings[0].score == 0.5


@pytest.mark.parametrize(
    "damaged",
    [5, [5], [(1, 1)], [(1, 0, ROWS)], [(1, 1, b"abc")], [(1, 3, ROWS)], [("a", 1, b"")], [(1, 1, 4)], [(1, 1, 2**62)]],
)
def test_damaged_embeddings_are_a_protocol_error(damaged: Any) -> None:
    with pytest.raises(ProtocolError, match="embeddings"):
        codec.decode_embeddings(codec.encode_embeddings(damaged))


def test_a_result_with_embeddings_has_a_json_form() -> None:
    result = Result(
        job_id="j", text="", tokens=(), embeddings=(Embedding(1, 1, b"\xff\xfe\xfd\xfc"),),
        finish_reason=FinishReason.STOP, stats=JobStats(mode="embed"), seed=1,
    )  # fmt: skip
    assert result.model_dump(mode="json")["embeddings"] == [[1, 1, "__79_A=="]]


def test_a_task_is_immutable_and_has_no_other_fields() -> None:
    with pytest.raises(ValidationError):
        EmbeddingTask(inputs=("a",), other=1)  # type: ignore[call-arg]
