"""Embeddings and rankings through real workers: the Python client, the openai package, the HTTP server."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis
from tests.support.http_clients import http_client
from tests.support.lazy_import import lazy_import
from tests.support.workers import only_worker
from typer.testing import CliRunner

from llamaq.cli.main import build_app
from llamaq.common.errors import OtherKindOfQueue
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.text_commands import TextAction
from llamaq.producer import AsyncClient, Client, JobFailed, JobKind, JobState, Pooling
from llamaq.producer.queries import text_commands

if TYPE_CHECKING:
    import langchain_openai
    import openai
    import tiktoken
    from tests.e2e.conftest import Await, ServedQueue, StartWorker
else:
    langchain_openai = lazy_import("langchain_openai")
    openai = lazy_import("openai")
    tiktoken = lazy_import("tiktoken")

NOISE = 2e-3
"""Bound on the difference between the same embedding from two batches, whose rounding errors differ."""
SLOW_BATCHES = """
import time
from llamaq.worker.embedding.embedding_engine import EmbeddingEngine

run = EmbeddingEngine.run

def run_slowly(self, batch):
    time.sleep(0.2)
    return run(self, batch)

EmbeddingEngine.run = run_slowly
"""
"""Code of a worker that computes about five batches a second."""
TEXTS = ["A cat sleeps on the sofa.", "The sun is hot.", "A kitten sleeps on the couch."]


def test_the_client_gets_one_scaled_embedding_for_each_text(embedder: ServedQueue) -> None:
    with embedder.client() as client:
        many = client.embed([*TEXTS, *[f"text {number}" for number in range(40)]])  # of two jobs
        alone = client.embed(TEXTS[2])
        card = only_worker(client).card
        last = client.stats().recent[0].job_id
        with Redis.from_url(embedder.url) as redis:
            assert 0 < redis.ttl(Keys().of_job(last).job) <= 120
    assert len(many) == 43
    assert (card.kind, card.pooling, card.n_embd) == (JobKind.EMBEDDING, Pooling.MEAN, len(many[0].vector))
    assert all(math.hypot(*each.vector) == pytest.approx(1, abs=1e-5) for each in many)
    assert alone[0].vector == pytest.approx(many[2].vector, abs=NOISE)
    assert alone[0].n_tokens == many[2].n_tokens > 5


def test_a_job_of_another_kind_is_refused_at_the_submit(embedder: ServedQueue, demo: ServedQueue) -> None:
    with embedder.client() as client:
        with pytest.raises(OtherKindOfQueue, match=r"'embedder' is for embedding jobs.*without --embeddings"):
            client.generate("Hello")
        with pytest.raises(OtherKindOfQueue, match="--pooling rank"):
            client.rerank("Hello", TEXTS)
        with pytest.raises(JobFailed, match=r"inputs\[1\]: .*too large.*--n-batch"):
            client.embed(["short", "long " * 300])
    with demo.client() as client, pytest.raises(OtherKindOfQueue, match="with --embeddings"):
        client.embed(TEXTS)


def test_documents_are_sorted_by_their_scores(reranker: ServedQueue) -> None:
    with reranker.client() as client:
        ranking = client.rerank("hello world", ["the cat", "paris", "i believe", "machine learning"])
        best = client.rerank("hello world", ["the cat", "paris", "i believe", "machine learning"], top_n=2)
    assert sorted(document.index for document in ranking) == [0, 1, 2, 3]
    scores = [document.score for document in ranking]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 4
    assert [document.index for document in best] == [document.index for document in ranking[:2]]


def test_the_command_line_prints_lines_of_json(embedder: ServedQueue, reranker: ServedQueue) -> None:
    def run(*arguments: str, stdin: str = "") -> list[dict[str, Any]]:
        done = CliRunner().invoke(build_app(arguments[0]), [*arguments, "--redis-url", embedder.url], input=stdin)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    lines = run("embed", "--queue", embedder.queue, "--dimensions", "4", stdin="a cat\nthe sun\n")
    assert [(line["index"], len(line["embedding"])) for line in lines] == [(0, 4), (1, 4)]
    ranked = run("rerank", "hello", "the cat", "paris", "--queue", reranker.queue, "--top-n", "1")
    assert [line["text"] for line in ranked] == [["the cat", "paris"][ranked[0]["index"]]]


async def test_the_openai_package_gets_the_embeddings_of_the_client(embedder: ServedQueue) -> None:
    async with http_client(embedder) as http:
        api = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
        answer = await api.embeddings.create(model="embedder", input=TEXTS)
        tokens: Any = [[1, 5, 6], [1, 7]]
        of_tokens = await api.embeddings.create(model="embedder", input=tokens, dimensions=8)
        floats = await http.post("/v1/embeddings", json={"input": TEXTS[0]})
        native = (await http.post("/embedding", json={"content": TEXTS[0]})).json()
        raw = (await http.post("/embeddings", json={"input": TEXTS[0], "embd_normalize": -1})).json()
        mixed = await http.post("/v1/embeddings", json={"input": [1, "cat", 5]})
        models = (await http.get("/v1/models")).json()
        await api.close()
    with embedder.client() as client:
        expected = client.embed(TEXTS)
    for one, other in zip(answer.data, expected, strict=True):
        assert one.embedding == pytest.approx(other.vector, abs=NOISE)
    assert answer.usage.prompt_tokens == sum(each.n_tokens for each in expected)
    assert [len(each.embedding) for each in of_tokens.data] == [8, 8]
    assert of_tokens.usage.prompt_tokens == 5
    assert floats.json()["data"][0]["embedding"] == pytest.approx(expected[0].vector, abs=NOISE)
    assert native[0]["embedding"][0] == pytest.approx(expected[0].vector, abs=NOISE)
    assert math.hypot(*raw[0]["embedding"][0]) > 1.5
    assert mixed.json()["usage"]["prompt_tokens"] > 2
    assert next(each for each in models["data"] if each["id"] == "embedder")["capabilities"] == ["embedding"]


async def test_documents_are_ranked_over_http_in_both_forms(reranker: ServedQueue, embedder: ServedQueue) -> None:
    body = {"query": "hello world", "documents": ["the cat", "paris", "i believe"], "top_n": 2}
    async with http_client(embedder) as http:  # the default queue computes embeddings, so the other queue is meant
        ranked = (await http.post("/v1/rerank", json=body)).json()
        tei = (await http.post("/rerank", json={"query": body["query"], "texts": body["documents"]})).json()
    with reranker.client() as client:
        expected = client.rerank("hello world", ["the cat", "paris", "i believe"])
    assert [one["index"] for one in ranked["results"]] == [one.index for one in expected[:2]]
    assert [one["relevance_score"] for one in ranked["results"]] == pytest.approx([one.score for one in expected[:2]])
    assert ranked["usage"]["prompt_tokens"] == sum(one.n_tokens for one in expected)
    assert [one["index"] for one in tei] == [one.index for one in expected]


async def test_a_queue_of_another_kind_is_a_501_and_a_long_text_a_400(demo: ServedQueue, embedder: ServedQueue) -> None:
    async with http_client(embedder) as http:
        refused = await http.post("/v1/embeddings", json={"input": "a", "model": demo.queue})
        chat = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        long = await http.post("/v1/embeddings", json={"input": "This is a test " * 512})
        wrong = await http.post("/v1/embeddings", json={"input": ["a", 1.5]})
    assert refused.status_code == chat.status_code == 501
    assert "--embeddings" in refused.json()["error"]["message"]
    assert (long.status_code, wrong.status_code) == (400, 400)
    assert "too large" in long.json()["error"]["message"]


@pytest.mark.interpreted  # it replaces a method of the engine
def test_jobs_of_a_killed_worker_are_computed_by_another_one(
    start_worker: StartWorker, embedder: ServedQueue, demo_model: Path, redis_url: str, wait_for: Await
) -> None:
    settings: Any = {"embeddings": True, "pooling": Pooling.MEAN, "lease_s": 1.0, "n_parallel": 2, "n_batch": 24}
    texts = [f"The cat number {number} sleeps on the sofa, and the sun is hot." for number in range(40)]
    # Slow batches: both jobs together take 8 s, so that neither ends before the kill.
    first = start_worker("killed-embedder", demo_model, patch=SLOW_BATCHES, **settings)
    with Client(redis_url, "killed-embedder", timeout_s=60) as client:
        requests: Any = [{"embed": {"inputs": texts[start : start + 20]}} for start in range(0, 40, 20)]
        jobs = client.submit_many(requests)
        wait_for(lambda: any(job.status().state is JobState.RUNNING for job in jobs))
        first.process.kill()
        attempts = [job.status().attempt for job in jobs]
        start_worker("killed-embedder", demo_model, **settings)
        results = [job.result() for job in jobs]
        assert max(job.status().attempt for job in jobs) > max(attempts)
    with embedder.client() as client:
        expected = client.embed(texts)
    vectors = [each.vector for result in results for each in result.embeddings or ()]
    assert len(vectors) == len(expected)
    for vector, other in zip(vectors, expected, strict=True):
        assert vector == pytest.approx(other.vector, abs=NOISE)


async def test_a_batch_has_the_embeddings_of_each_line(embedder: ServedQueue, demo: ServedQueue) -> None:
    bodies: list[dict[str, Any]] = [
        {"input": TEXTS},
        {"input": TEXTS[0], "dimensions": 4, "encoding_format": "base64"},
        {"input": ["x"] * 33},
        {"input": [1, "cat", 5]},
        {"input": []},
    ]
    lines = [
        {"custom_id": str(number), "url": "/v1/embeddings", "body": {"model": embedder.queue, **body}}
        for number, body in enumerate(bodies)
    ]
    other = {**lines[0], "body": {**bodies[0], "model": demo.queue}}
    async with http_client(embedder) as http:
        direct = [(await http.post("/v1/embeddings", json=line["body"])).json() for line in lines]
        batches = []
        for content in (lines, [other]):
            files = {"file": ("in.jsonl", "".join(json.dumps(line) + "\n" for line in content).encode())}
            file = (await http.post("/v1/files", files=files, data={"purpose": "batch"})).json()
            asked = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
            batch = (await http.post("/v1/batches", json=asked)).json()
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.02)
                batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
            batches.append(batch)
        done, refused = batches
        output = (await http.get(f"/v1/files/{done['output_file_id']}/content")).text
        error = (await http.get(f"/v1/files/{done['error_file_id']}/content")).json()
    answers = [each["response"]["body"] for each in sorted(map(json.loads, output.splitlines()), key=custom_id_of)]
    assert done["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
    for answer, expected in zip(answers, direct, strict=False):
        for one, other_one in zip(answer.pop("data"), expected.pop("data"), strict=True):
            assert (one["object"], one["index"]) == (other_one["object"], other_one["index"])
            assert numbers_of(one["embedding"]) == pytest.approx(numbers_of(other_one["embedding"]), abs=NOISE)
        assert answer == expected
    assert done["usage"]["input_tokens"] == sum(each["usage"]["prompt_tokens"] for each in direct[:4])
    assert error["custom_id"] == "4"
    assert direct[4]["error"]["message"] in error["error"]["message"]
    assert (refused["status"], refused["errors"]["data"][0]["code"]) == ("failed", "wrong_model")


def numbers_of(embedding: str | list[float]) -> list[float]:
    """Return the numbers of an embedding that is a list or base64."""
    return embedding if isinstance(embedding, list) else list(array("f", base64.b64decode(embedding)))


async def test_langchain_gets_the_embeddings_of_its_texts_or_of_its_tokens(
    embedder: ServedQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = await encoding_of(embedder)
    monkeypatch.setattr("tiktoken.encoding_for_model", lambda _: encoding)  # those of OpenAI are downloaded
    async with http_client(embedder) as http:
        options: Any = {"model": embedder.queue, "base_url": f"{http.base_url}/v1", "api_key": "none", "max_retries": 0}
        options["http_async_client"] = http  # otherwise its connections are never closed
        by_text = langchain_openai.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
        by_tokens = langchain_openai.OpenAIEmbeddings(**options)
        documents = [await each.aembed_documents(TEXTS) for each in (by_text, by_tokens)]
        query = await by_text.aembed_query(TEXTS[0])
    with embedder.client() as client:
        expected = [client.embed(TEXTS), client.embed([encoding.encode(text) for text in TEXTS])]
    for found, embeddings in zip(documents, expected, strict=True):
        for vector, embedding in zip(found, embeddings, strict=True):
            assert vector == pytest.approx(embedding.vector, abs=NOISE)
    assert query == pytest.approx(documents[0][0], abs=NOISE)


async def encoding_of(embedder: ServedQueue) -> tiktoken.Encoding:
    """Return the vocabulary of a worker's model as an encoding of tiktoken."""
    async with AsyncClient(embedder.url, embedder.queue) as client:
        tokens = list(range(2048))
        reply = await text_commands.ask(client.connection, TextAction.DETOKENIZE, None, tokens=tokens, with_pieces=True)
    ranks = {bytes(piece): token for token, piece in zip(tokens, reply.pieces, strict=True) if piece}
    return tiktoken.Encoding("demo", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})


def custom_id_of(line: dict[str, Any]) -> str:
    """Return the id that the client gave a line."""
    return str(line["custom_id"])
