"""POST /completion and /infill: llama-server's own endpoints that generate text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.gateway.completions.logprobs import token_object, tokens_of
from llamaq.gateway.context import Context, context_of
from llamaq.gateway.generation import Generation
from llamaq.gateway.http.event_stream import Events, EventStream, data
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.infill import with_gap
from llamaq.gateway.native_format import NativeOptions, drawn_object, final_object, partial_object, read_native_body
from llamaq.gateway.progress_fields import ProgressFields, ProgressOptions
from llamaq.gateway.prompt_too_long_error import as_llama_server, explaining_long_prompts
from llamaq.gateway.queue_of_request import ChosenModel, generation_for, model_for
from llamaq.gateway.request_tokenization import with_tokens
from llamaq.producer import Chunk, Result
from llamaq.producer.openai_format.request_body import read_model


async def complete(request: Request) -> Response:
    """Continue a text, or several."""
    fields = await read_object(request)
    model = await model_for(request, read_model(fields))
    return await _answer(request, model, await with_tokens(model.client, fields))


async def fill_gap(request: Request) -> Response:
    """Write what belongs into the gap of a text."""
    fields = await read_object(request)
    model = await model_for(request, read_model(fields))
    return await _answer(request, model, await with_tokens(model.client, await with_gap(model.client, fields)))


async def _answer(request: Request, model: ChosenModel, fields: Mapping[str, Any]) -> Response:
    context, options, body = context_of(request), NativeOptions.read(fields), read_native_body(fields)
    generation = generation_for(request, model, body.jobs)
    answers = _Answers(context, generation, body.model or model.client.queue, options)
    async with explaining_long_prompts(context, generation, as_llama_server):
        if not body.is_streamed:
            results = enumerate(await generation.results())
            found = [options.chosen(await answers.whole(result, index)) for index, result in results]
            return json_response(found[0] if len(found) == 1 else found)
        await generation.start()
        events = answers.events(ProgressOptions.read(fields))
        return await EventStream.open(events, comment=generation.describe_wait, ping_s=context.settings.ping_s)


def by_token(chunk: Chunk) -> list[Chunk]:
    """Split a chunk with probabilities into one chunk for each token, as in llama-server. The last chunk has the text.

    A chunk has several tokens if they arrived together. A chunk without probabilities is not changed.
    """
    if len(chunk.logprobs) <= 1:
        return [chunk]
    last = len(chunk.tokens) - 1
    return [
        replace(chunk, text=chunk.text if at == last else "", tokens=(token,), logprobs=(chunk.logprobs[at],))
        for at, token in enumerate(chunk.tokens)
    ]


class _Answers:
    """The answers to the jobs of one request."""

    def __init__(self, context: Context, generation: Generation, model: str, options: NativeOptions) -> None:
        self._context = context
        self._generation = generation
        self._model = model
        self._options = options

    async def whole(self, result: Result, index: int) -> dict[str, Any]:
        """Return the whole answer of one job."""
        answer = await self._final(result, index, has_tokens=self._options.has_tokens)
        return answer | await self._probabilities(result.tokens, result.logprobs or ())

    async def events(self, progress: ProgressOptions) -> Events:
        """Yield the encoded events of a stream."""
        fields_of = [ProgressFields(progress).of for _ in self._generation.streams]
        explaining = explaining_long_prompts(self._context, self._generation, as_llama_server)
        async with explaining, aclosing(self._generation.pieces()) as pieces:
            async for index, piece in pieces:
                if isinstance(piece, Result):
                    final = await self._final(piece, index, has_tokens=False)
                    yield data(self._options.chosen(final | {"content": ""}))
                elif (fields := fields_of[index](piece)) is not None:
                    for part in by_token(piece):
                        probabilities = await self._probabilities(part.tokens, part.logprobs)
                        yield data(partial_object(index, part.text, part.tokens) | probabilities | fields)

    async def _final(self, result: Result, index: int, *, has_tokens: bool) -> dict[str, Any]:
        request, client = self._generation.requests[index], self._generation.client
        card = await self._context.queues.card(client.queue)
        return final_object(result, index, request=request, card=card, model=self._model, has_tokens=has_tokens)

    async def _probabilities(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the field `completion_probabilities` of some tokens, if the request asked for it."""
        if not logprobs:
            return {}
        pieces = await self._context.models.token_bytes(self._generation.client, tokens_of(tokens, logprobs))
        pairs = zip(tokens, logprobs, strict=True)
        entries = [token_object(token, each, pieces) for token, each in pairs]
        return {"completion_probabilities": [*map(drawn_object, entries)] if self._options.has_drawn_probs else entries}
