"""What the server has learned from workers about the models of the queues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from redis.exceptions import RedisError

from llamaq.common.errors import LlamaqError
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.keys import JobId
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.token_bytes_cache import TokenBytesCache, starts_of
from llamaq.producer.answer_forms import AnswerForms
from llamaq.producer.answer_parts.answer_format import AnswerForm

ASK_TIMEOUT_S = 2.0
"""An answer does not wait longer for the bytes of tokens that are only counted."""


@dataclass(frozen=True, slots=True)
class ModelKnowledge:
    """What is needed to prepare requests, and to build their answers."""

    queues: QueueDirectory
    pieces: TokenBytesCache
    """The bytes of tokens."""
    forms: AnswerForms
    """How the answers of models are written."""

    async def count_reasoning(self, form: AnswerForm, *results: Result) -> int:
        """Return how many tokens of a request's answers begin in their reasoning, without the tags.

        If no worker tells the bytes of the tokens, the number is estimated by the length of the texts.
        """
        found = [(result, spans) for result in results if (spans := _reasoning_spans(form, result))]
        if not found:
            return 0
        with suppress(LlamaqError, RedisError, TimeoutError):
            async with asyncio.timeout(ASK_TIMEOUT_S):
                client = await self.queues.client(JobId.parse(results[0].job_id).queue)
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
