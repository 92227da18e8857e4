"""Turns the output of a job into pieces of text with probabilities, into the ended response, or into a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from llamaq.common.protocol.job_outcome import Result, TokenLogprobs
from llamaq.common.protocol.keys import JobId
from llamaq.gateway.completions.logprobs import tokens_of
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.responses.record import ResponseRecord, output_items_of
from llamaq.gateway.responses.response_object import ended_response, is_complete
from llamaq.gateway.responses.token_cuts import Cut, TokenCuts
from llamaq.producer import Chunk
from llamaq.producer.openai_format.tools import message_of


class AnswerText(NamedTuple):
    """A piece of an answer, with the arguments of `OutputItems.feed`."""

    text: str
    logprobs: list[dict[str, Any]]
    tag_offsets: tuple[int, ...]


class AnswerReader:
    """Cuts the text of one answer at its tokens, if the response shows their probabilities."""

    def __init__(self, models: ModelKnowledge, job_id: str, record: ResponseRecord) -> None:
        self._models = models
        self._form = record.form
        self._queue = JobId.parse(job_id).queue
        self._cuts = TokenCuts() if record.has_logprobs else None
        self._tag_offsets: tuple[int, ...] = ()
        """The offsets of tags that belong to no text so far. The text of a chunk may wait for its last token."""

    async def read(self, piece: Chunk | Result) -> list[AnswerText]:
        """Return the texts of the next chunk, with their probabilities. A result is the end of the chunks."""
        if isinstance(piece, Result):
            return [] if self._cuts is None else self._with_tags(self._cuts.finish())
        self._tag_offsets += piece.tag_offsets
        return self._with_tags(await self._cut(piece.text, piece.tokens, piece.logprobs))

    async def read_whole(self, result: Result) -> list[AnswerText]:
        """Return all texts of an answer with their probabilities."""
        self._tag_offsets += result.tag_offsets
        cuts = await self._cut(result.text, result.tokens, result.logprobs or ())
        return [*self._with_tags(cuts), *await self.read(result)]

    async def count_reasoning(self, result: Result) -> int:
        """Return how many tokens of the answer are reasoning."""
        return await self._models.count_reasoning(self._form, result)

    def _with_tags(self, cuts: Iterable[Cut]) -> list[AnswerText]:
        texts = []
        for text, logprobs in cuts:
            texts.append(AnswerText(text, logprobs, self._tag_offsets))
            self._tag_offsets = ()
        return texts

    async def _cut(self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Cut]:
        if self._cuts is None:
            return [(text, [])]
        if not logprobs:
            tokens = ()
        client = await self._models.queues.client(self._queue, waits=True)
        pieces = await self._models.token_bytes(client, tokens_of(tokens, logprobs))
        return list(self._cuts.feed(text, tokens, logprobs, pieces))


async def read_response(models: ModelKnowledge, job_id: str, record: ResponseRecord, result: Result) -> dict[str, Any]:
    """Return the response of a job that has ended."""
    reader = AnswerReader(models, job_id, record)
    output = output_items_of(job_id, record)
    for each in await reader.read_whole(result):
        for _ in output.feed(*each):
            pass
    for _ in output.finish(is_complete=is_complete(result)):
        pass
    return ended_response(job_id, record, result, output.items, await reader.count_reasoning(result))


def answer_message(job_id: str, record: ResponseRecord, result: Result) -> dict[str, Any]:
    """Return the answer as the message of the assistant that a conversation continues."""
    message = message_of(record.form.splitter().read(result), job_id)
    return message | {"content": message["content"] or ""}
