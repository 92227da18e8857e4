"""What the server has learned from workers about the models of the queues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from redis.exceptions import RedisError

from llamaq.common.errors import LlamaqError
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.keys import JobId
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.token_bytes_cache import TokenBytesCache, starts_of
from llamaq.gateway.worker_wait import reply_within
from llamaq.producer import AsyncClient
from llamaq.producer.answer_forms import AnswerForms
from llamaq.producer.answer_parts.answer_format import AnswerForm

ASK_TIMEOUT_S = 2.0
"""An answer does not wait longer for the bytes of tokens that are only counted."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelKnowledge:
    """What is needed to prepare requests, and to build their answers."""

    queues: QueueDirectory
    pieces: TokenBytesCache
    """The bytes of tokens."""
    forms: AnswerForms
    """How the answers of models are written."""
    waits: bool = False
    """Whether an answer that needs a worker waits for one. Otherwise it is an error while the queue has no worker."""

    async def reply(self, client: AsyncClient, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the reply that the answer to a request needs. If `waits`, it waits for a worker up to `timeout_s`.

        The job of the request has used a worker, but the queue may have none any more.

        Args:
            client: The client of the queue.
            ask: Asks a worker.

        Raises:
            LlamaqError: No worker of the queue has answered.
        """
        return await (reply_within(client.settings.timeout_s, ask) if self.waits else ask())

    async def token_bytes(self, client: AsyncClient, tokens: set[int]) -> Mapping[int, bytes]:
        """Return the bytes of the tokens of an answer, as `TokenBytesCache.of` does."""
        return await self.reply(client, lambda: self.pieces.of(client, tokens))

    async def count_reasoning(self, form: AnswerForm, *results: Result) -> int:
        """Return how many tokens of a request's answers begin in their reasoning, without the tags.

        If no worker tells the bytes of the tokens, the number is estimated by the length of the texts.
        """
        found = [(result, spans) for result in results if (spans := _reasoning_spans(form, result))]
        if not found:
            return 0
        with suppress(LlamaqError, RedisError, TimeoutError):
            async with asyncio.timeout(ASK_TIMEOUT_S):
                client = await self.queues.client(JobId.parse(results[0].job_id).queue, waits=True)
                pieces = await self.pieces.of(client, {token for result, _ in found for token in result.tokens})
            return sum(
                start <= place < end
                for result, spans in found
                for place in starts_of(result.tokens, pieces)
                for start, end in spans
            )
        return sum(
            round(len(result.tokens) * sum(end - start for start, end in spans) / len(result.text))
            for result, spans in found
        )


def _reasoning_spans(form: AnswerForm, result: Result) -> Sequence[tuple[int, int]]:
    splitter = form.splitter()
    splitter.feed(result.text, result.tag_offsets)
    splitter.finish()
    return splitter.reasoning_spans
