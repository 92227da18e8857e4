"""What the server has learned from workers about the models of the queues."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from llamaq.common.errors import LlamaqError
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.keys import JobId
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.token_bytes_cache import TokenPieces, starts_of
from llamaq.producer.answer_form_detection import AnswerForms
from llamaq.producer.answer_parts.answer_format import AnswerForm

ASK_TIMEOUT_S = 2.0
"""An answer does not wait longer for the bytes of tokens that are only counted."""


@dataclass(frozen=True, slots=True)
class ModelKnowledge:
    """What is needed to prepare requests, and to build their answers."""

    queues: QueueDirectory
    pieces: TokenPieces
    """The bytes of tokens."""
    forms: AnswerForms
    """How the answers of models are written."""

    async def count_reasoning(self, form: AnswerForm, result: Result) -> int:
        """Return how many tokens of an answer begin in its reasoning, without the tags.

        If no worker tells the bytes of the tokens, the number is estimated by the length of the texts.
        """
        splitter = form.splitter()
        if splitter is None:
            return 0
        splitter.feed(result.text, result.tag_offsets)
        splitter.finish()
        spans = splitter.reasoning_spans
        n_chars = sum(end - start for start, end in spans)
        if not n_chars:
            return 0
        with suppress(LlamaqError, TimeoutError):
            async with asyncio.timeout(ASK_TIMEOUT_S):
                client = await self.queues.find(JobId.parse(result.job_id).queue)
                pieces = await self.pieces.of(client, {*result.tokens})
            places = starts_of(result.tokens, pieces)
            return sum(start <= place < end for place in places for start, end in spans)
        return round(len(result.tokens) * n_chars / len(result.text))
