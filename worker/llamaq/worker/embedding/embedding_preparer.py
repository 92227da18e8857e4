"""Turns the bytes of a request into an embedding job that can be admitted. Does not run on the engine thread."""

from __future__ import annotations

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.embedding_task import EmbeddingTask, JobKind, Pooling
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.claimed_request import QUICK_BYTES, read_request
from llamaq.worker.core.job import Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.embedding.embedding_job import EmbeddingJob
from llamaq.worker.embedding.rerank_prompt import encode_pair

MAX_RESULT_BYTES = 32 * 1024 * 1024
"""Largest size of the embeddings of one job. Redis and the client have them in memory at once."""
FLOAT_BYTES = 4


class EmbeddingPreparer:
    """Validates and tokenizes the texts of embedding jobs. Thread-safe.

    Args:
        vocab: The model's vocabulary.
        pooling: How the worker pools the vectors of tokens.
        n_embd: Number of dimensions of an embedding.
        max_tokens: Largest number of tokens of a text.
        max_request_bytes: Largest size of an encoded request.
    """

    def __init__(self, vocab: Vocab, *, pooling: Pooling, n_embd: int, max_tokens: int, max_request_bytes: int) -> None:
        self._vocab = vocab
        self._pooling = pooling
        self._n_embd = n_embd
        self._max_tokens = max_tokens
        self._max_request_bytes = max_request_bytes

    @property
    def kind(self) -> JobKind:
        """The kind of the jobs that the worker runs."""
        return JobKind.RERANKING if self._pooling is Pooling.RANK else JobKind.EMBEDDING

    def is_quick(self, payload: bytes) -> bool:
        """Return whether the job of an encoded request is prepared in less than a millisecond."""
        return len(payload) <= QUICK_BYTES

    def may_have_grammar(self, payload: bytes) -> bool:  # noqa: ARG002 - the interface has it
        """Return False: an embedding has no grammar."""
        return False

    def prepare(self, payload: bytes, lease: Lease, published: TokenSpan, times: JobTimes) -> PreparedJob:
        """Return the job of an encoded request.

        Args:
            payload: The request as msgpack.
            lease: The job's entry in Redis.
            published: The output that earlier attempts have published. An embedding job never has any.
            times: When the job was submitted, when it must end, and how long it has had a slot.

        Raises:
            JobRejected: The request is not valid, or its job cannot run on this worker.
        """
        request = read_request(payload, lease, self._max_request_bytes)
        task = request.embed
        if task is None or request.kind is not self.kind:
            raise JobRejected(
                ErrorCode.INVALID_REQUEST,
                f"this worker runs {self.kind} jobs (--embeddings, --pooling), and this is a job for {request.kind}",
            )
        if published.tokens:
            raise JobRejected(ErrorCode.INVALID_REQUEST, "an embedding job has no tokens, but earlier attempts had")
        texts = tuple(self._text(task, index) for index in range(len(task.inputs)))
        self._check_size(task, texts)
        return PreparedJob(EmbeddingJob(lease, request, texts, times=times), [])

    def _text(self, task: EmbeddingTask, index: int) -> tuple[int, ...]:
        """Return the tokens of one input."""
        try:
            tokens = self._tokenize(task, index)
        except JobRejected as exc:
            raise JobRejected(exc.code, f"inputs[{index}]: {exc.message}") from exc
        if not tokens:
            raise JobRejected(ErrorCode.INVALID_REQUEST, f"inputs[{index}]: empty, and this model adds no token to it")
        if max(tokens) >= self._vocab.n_tokens:
            message = f"inputs[{index}]: token id {max(tokens)} is not in the vocabulary of {self._vocab.n_tokens}"
            raise JobRejected(ErrorCode.INVALID_TOKEN, message)
        if len(tokens) > self._max_tokens:
            raise JobRejected(
                ErrorCode.PROMPT_TOO_LONG,
                f"inputs[{index}]: {len(tokens)} tokens are too large: a text can have {self._max_tokens} on this "
                "worker (limited by --n-batch, --n-ubatch and the model's training context)",
            )
        return tokens

    def _tokenize(self, task: EmbeddingTask, index: int) -> tuple[int, ...]:
        given = task.inputs[index]
        if not isinstance(given, str):
            return given
        if task.query is None:
            return tuple(self._vocab.encode_whole(given, max_tokens=self._max_tokens))
        return tuple(encode_pair(self._vocab, task.query, given, max_tokens=self._max_tokens))

    def _check_size(self, task: EmbeddingTask, texts: tuple[tuple[int, ...], ...]) -> None:
        """Raise `JobRejected` if the model has fewer dimensions than asked for, or the embeddings are too large."""
        if task.dimensions is not None and task.dimensions > self._n_embd:
            message = f"dimensions: {task.dimensions}, but an embedding of this model has {self._n_embd}"
            raise JobRejected(ErrorCode.INVALID_REQUEST, message)
        n_rows = sum(map(len, texts)) if self._pooling is Pooling.NONE else len(texts)
        n_bytes = n_rows * (task.dimensions or self._n_embd) * FLOAT_BYTES
        if n_bytes > MAX_RESULT_BYTES:
            raise JobRejected(
                ErrorCode.INVALID_REQUEST,
                f"inputs: their embeddings have {n_bytes} bytes, more than {MAX_RESULT_BYTES}: send fewer in one job, "
                "or set dimensions",
            )
