"""One choice of a streamed completion: turns its pieces into chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from llamaq.common.protocol.job_outcome import FinishReason, TokenLogprobs
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.gateway.completions.prompt_probabilities import PromptFields, write_off_the_loop
from llamaq.gateway.completions.stream_chunks import StreamChunks
from llamaq.gateway.completions.token_id_fields import TokenIdFields
from llamaq.gateway.http.event_stream import PLACEHOLDER, TextEvent, data
from llamaq.gateway.progress_fields import ProgressFields, ProgressOptions
from llamaq.gateway.token_bytes_cache import TokenStarts
from llamaq.producer import Chunk, Result
from llamaq.producer.answer_parts.answer_splitter import AnswerSplitter
from llamaq.producer.answer_parts.parts import CallStarted, Part
from llamaq.producer.openai_format.endpoints import Endpoint

DescribeLogprobs = Callable[[Sequence[int], Sequence[TokenLogprobs], TokenStarts], Awaitable[dict[str, Any]]]
"""Returns the object `logprobs` of tokens. The last argument finds where they begin in the text of the choice."""
DescribePrompt = Callable[[PromptLogprobs, str], Awaitable[PromptFields]]
"""Returns what a choice has about the probabilities of its prompt, and of the echoed text."""


class ChoiceStream:
    """The chunks of one choice.

    Args:
        chunks: Builds the chunks of the answer.
        index: Number of the choice.
        job_id: The job of the choice.
        echoed: The text before the generated text.
        splitter: Splits the answer into its parts. None: it is content alone.
        describe_logprobs: Describes the probabilities of tokens.
        describe_prompt: Describes the probabilities of the prompt.
        scores_echo: Whether the echoed text has probabilities.
        progress: Which fields about the progress of the answer the chunks have.
        token_ids: Adds the tokens to the chunks. None: the chunks have no tokens.
    """

    def __init__(
        self,
        chunks: StreamChunks,
        index: int,
        job_id: str,
        echoed: str,
        splitter: AnswerSplitter | None,
        describe_logprobs: DescribeLogprobs,
        describe_prompt: DescribePrompt,
        progress: ProgressOptions,
        *,
        scores_echo: bool = False,
        token_ids: TokenIdFields | None = None,
    ) -> None:
        self._chunks = chunks
        self._index = index
        self._job_id = job_id
        self._echoed = echoed
        self._splitter = splitter
        self._describe_logprobs = describe_logprobs
        self._describe_prompt = describe_prompt
        self._scores_echo = scores_echo
        self._has_prompt = False
        """Whether the probabilities of the prompt were written."""
        self._progress = ProgressFields(progress)
        self._token_ids = token_ids
        self._is_plain = splitter is None and not progress and token_ids is None
        """Whether chunks have nothing but text, unless they have probabilities."""
        self._text_event: TextEvent | None = None
        """The chunk for new text without other fields. Most chunks have this form."""
        self._has_begun = False
        self._starts = TokenStarts(len(echoed))
        """Finds where tokens begin in the text. The text so far does not tell it: text is withheld while it may become
        a stop string, but its tokens are not."""
        self._has_call = False
        """Whether the answer calls a tool."""

    async def events_of(self, piece: Chunk | Result) -> bytes:
        """Return the encoded chunks for the next piece of the job, or for its end."""
        if self._has_begun and self._is_plain and isinstance(piece, Chunk) and not _has_probabilities(piece):
            return self._encode_text(piece.text) if piece.text else b""
        chunks = await self._chunks_of(piece)
        if self._token_ids is not None:
            self._token_ids.write(chunks, () if isinstance(piece, Result) else piece.tokens)
        return await write_off_the_loop([piece.prompt_logprobs], lambda: b"".join(map(data, chunks)))

    def _encode_text(self, text: str) -> bytes:
        if self._text_event is None:
            self._text_event = TextEvent(self._chunks.text(self._index, PLACEHOLDER))
        return self._text_event.encode(text)

    async def _chunks_of(self, piece: Chunk | Result) -> list[dict[str, Any]]:
        fields = self._progress.end(piece.stats) if isinstance(piece, Result) else self._progress.of(piece)
        if fields is None:
            return []
        first = [] if self._has_begun else list(self._begin())
        self._has_begun = True
        first += await self._prompt_of(piece)
        if isinstance(piece, Result):
            return _with_usage(first + self._end(piece), fields)
        if piece.progress is not None:
            *before, last = first or [self._chunks.empty(self._index)]
            return [*before, last | fields]
        new = await self._content_of(piece)
        if new:
            new[-1] |= fields
        return _with_usage(first + new, fields)

    async def _prompt_of(self, piece: Chunk | Result) -> list[dict[str, Any]]:
        """Return the chunk with the probabilities of the prompt, if the piece is the first one that has them."""
        is_last_chance = self._scores_echo and isinstance(piece, Result)
        if self._has_prompt or (piece.prompt_logprobs is None and not is_last_chance):
            return []
        self._has_prompt, prompt = True, PromptFields()
        if piece.prompt_logprobs is not None:
            prompt = await self._describe_prompt(piece.prompt_logprobs, self._echoed)
        chunk = self._chunks.empty(self._index)
        if self._scores_echo:
            chunk = self._chunks.text(self._index, self._echoed, prompt.logprobs)
        if self._chunks.endpoint is Endpoint.CHAT:
            return [chunk | prompt.listed]
        return [chunk | {"choices": [choice | prompt.listed for choice in chunk["choices"]]}]

    async def _content_of(self, piece: Chunk) -> list[dict[str, Any]]:
        found, logprobs = [], None
        if piece.logprobs:
            logprobs = await self._describe_logprobs(piece.tokens, piece.logprobs, self._starts)
        if self._splitter is not None:
            found += self._parts(self._splitter.feed(piece.text, piece.tag_offsets))
            if logprobs:
                found.append(self._chunks.delta(self._index, {}, logprobs))
        elif piece.text or logprobs:
            found.append(self._chunks.text(self._index, piece.text, logprobs))
        return found

    def _begin(self) -> Iterator[dict[str, Any]]:
        if self._chunks.endpoint is Endpoint.CHAT:
            yield self._chunks.first(self._index)
        elif self._echoed and not self._scores_echo:
            yield self._chunks.text(self._index, self._echoed)

    def _end(self, result: Result) -> list[dict[str, Any]]:
        is_cut = result.finish_reason is not FinishReason.STOP
        parts = [] if self._splitter is None else self._parts(self._splitter.finish(is_cut=is_cut))
        return [*parts, self._chunks.last(self._index, result, is_call=self._has_call)]

    def _parts(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        self._has_call |= any(isinstance(part, CallStarted) for part in parts)
        return [self._chunks.part(self._index, part, self._job_id) for part in parts]


def _has_probabilities(piece: Chunk) -> bool:
    return bool(piece.logprobs) or piece.prompt_logprobs is not None


def _with_usage(chunks: list[dict[str, Any]], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks, each with the field `usage` if the request asks for it."""
    if "usage" in fields:
        for chunk in chunks:
            chunk["usage"] = fields["usage"]
    return chunks
