"""Calls to a queue of an embedding model or a reranker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from llamaq.common.protocol.embedding_task import Embedding, Normalization
from llamaq.producer import embed_and_rerank
from llamaq.producer.argument_checks import check_count
from llamaq.producer.calls.calls_base import ClientCalls
from llamaq.producer.embed_and_rerank import EmbeddingInputs, EmbeddingOptions, RankedDocument


class EmbeddingCalls(ClientCalls):
    """Calls to a queue of an embedding model or a reranker."""

    async def embed(
        self,
        inputs: EmbeddingInputs,
        *,
        dimensions: int | None = None,
        normalization: Normalization | Literal["euclidean", "taxicab", "max_absolute", "none"] | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> tuple[Embedding, ...]:
        """Compute the embeddings of texts, on a queue whose workers run with `--embeddings`.

            for embedding in client.embed(["one text", "another"]):
                print(embedding.vector)

        Each job computes at most 32 texts. When the call fails, times out or is interrupted, its jobs that have not
        ended are cancelled, unless the call has an idempotency key.

        Args:
            inputs: A text, a list of token ids, or a list of texts and lists of token ids. No token is added to token
                ids.
            dimensions: Number of values of each embedding that are returned, from the first on. Use it only with models
                that were trained for it. None: all.
            normalization: How embeddings are scaled. None: to the Euclidean length 1.
            timeout: Longest wait for the embeddings in seconds. None: the client's `timeout_s`.
            **options: Job options.

        Returns:
            One embedding for each input, in their order: `vector` is a list of floats, `data` the same as bytes, and
            `n_tokens` the number of tokens.

        Raises:
            InvalidRequest: An argument is not valid.
            OtherKindOfQueue: The workers of the queue run without `--embeddings`. Nothing was submitted.
            JobFailed: A text is too long for the workers, or a job failed for another reason.
            LlamaqError: The other errors of `generate`.
        """
        task = {"dimensions": dimensions, "normalization": normalization}
        tasks = embed_and_rerank.split_task(embed_and_rerank.as_list(inputs), **task)
        return await embed_and_rerank.compute(self.auto_cancelled, tasks, options, timeout)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> tuple[RankedDocument, ...]:
        """Sort documents by how well they answer a query, on a queue with a model for reranking (`--pooling rank`).

        Args:
            query: The query.
            documents: The documents.
            top_n: Largest number of documents to return. None: all.
            timeout: Longest wait for the scores in seconds. None: the client's `timeout_s`.
            **options: Job options.

        Returns:
            For each document its `index` in `documents`, its `score`, and its number of tokens. The best one is first.

        Raises:
            LlamaqError: The same errors as `embed`.
        """
        if top_n is not None:
            check_count("top_n", top_n, 1)
        tasks = embed_and_rerank.split_task(embed_and_rerank.as_list(documents, "documents"), query=query)
        return embed_and_rerank.rank(
            await embed_and_rerank.compute(self.auto_cancelled, tasks, options, timeout), top_n
        )
