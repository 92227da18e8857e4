"""Embeddings of texts, in the forms of OpenAI and of llama-server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from llamaq.common.protocol.embedding_task import Pooling
from llamaq.gateway.embedding_and_rerank_format import (
    EmbeddingBody,
    embedding_usage,
    encode_embeddings,
    encode_native_embeddings,
    read_embedding_body,
)
from llamaq.gateway.http.answer_writer import write_if_large_off_the_loop
from llamaq.gateway.http.errors import invalid
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.request_tokenization import with_tokens
from llamaq.producer import AsyncClient, Result
from llamaq.producer.embed_and_rerank import INPUTS_PER_JOB, join_results, split_task
from llamaq.producer.openai_format.request_body import read_model

NOT_POOLED = (
    "the workers of this queue do not pool (--pooling none), so a text has no single embedding: start them with "
    "another --pooling, or use POST /embeddings"
)


@dataclass(frozen=True, slots=True)
class PreparedEmbedding:
    """A request of `/v1/embeddings` or `/embeddings`."""

    model: str
    """The name of the model that the answer shows."""
    is_native: bool
    """Whether the answer has the form of llama-server."""
    is_base64: bool
    jobs: Sequence[dict[str, Any]]
    """The arguments of `submit` for each job. Each job has some of the texts."""

    n_choices = 1

    @classmethod
    async def read(
        cls, queues: QueueDirectory, client: AsyncClient, fields: Mapping[str, Any], *, is_native: bool = False
    ) -> Self:
        """Return what the body of a request asks for.

        Args:
            queues: The queues.
            client: The client of the queue.
            fields: The decoded JSON object.
            is_native: Whether the endpoint is one of llama-server's own. A body may also ask for llama-server's form.

        Raises:
            RequestRefused: The workers of the queue cannot answer it.
            InvalidRequest: A field is not valid. The message names it.
            LlamaqError: The request needs a worker, and none has replied.
        """
        body = read_embedding_body(fields)
        is_native = is_native or body.is_native
        card = await queues.card(client.queue)
        if card is not None and card.pooling is Pooling.NONE:
            _check_unpooled(body, is_native=is_native)
        inputs = (await with_tokens(client, {"prompt": body.inputs}))["prompt"]
        tasks = split_task(inputs, dimensions=body.dimensions, normalization=body.normalization)
        jobs = [{**body.options, **task} for task in tasks]
        return cls(read_model(fields) or client.queue, is_native, body.is_base64, jobs)

    async def answer(self, results: Sequence[Result]) -> bytes:
        """Return the body of the answer as JSON. The event loop runs meanwhile: it may have millions of numbers.

        Raises:
            RequestRefused: The workers of the queue do not pool.
            JobFailed: A job has ended before its embeddings were computed.
        """
        embeddings = join_results(results)
        n_bytes = sum(len(each.data) for each in embeddings)
        if self.is_native:
            return await write_if_large_off_the_loop(n_bytes, lambda: encode_native_embeddings(embeddings))
        if any(each.n_rows != 1 for each in embeddings):  # the worker has started meanwhile
            raise invalid(NOT_POOLED)
        return await write_if_large_off_the_loop(
            n_bytes, lambda: encode_embeddings(embeddings, self.model, is_base64=self.is_base64)
        )

    def usage(self, results: Sequence[Result]) -> dict[str, int]:
        """Return the `usage` of the answer. Raises `JobFailed` as in `answer`."""
        return embedding_usage(join_results(results))


def _check_unpooled(body: EmbeddingBody, *, is_native: bool) -> None:
    """Refuse requests that workers without pooling cannot answer. Their answers have a vector for each token of each
    text.
    """
    if not is_native:
        raise invalid(NOT_POOLED)
    if len(body.inputs) > INPUTS_PER_JOB:
        raise invalid(
            f"input: at most {INPUTS_PER_JOB} texts, because these workers do not pool (--pooling none)", "input"
        )
