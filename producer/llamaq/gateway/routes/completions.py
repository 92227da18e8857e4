"""POST /v1/chat/completions and /v1/completions: OpenAI's endpoints that generate text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.token_logprobs import TokenLogprobs
from llamaq.gateway.choice_stream import ChoiceStream
from llamaq.gateway.context import FINGERPRINT, Context, context_of
from llamaq.gateway.generation import Generation
from llamaq.gateway.http.event_stream import DONE, Events, EventStream, data
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.long_prompts import explaining_long_prompts
from llamaq.gateway.permissions import generation_for, queue_for
from llamaq.gateway.prompt_texts import with_tokens
from llamaq.gateway.token_pieces import TokenPieces
from llamaq.gateway.verbose_answers import verbose_fields
from llamaq.producer import AsyncClient, Result
from llamaq.producer.answer_parts.answer_format import CONTENT_ALONE, AnswerSplitter
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.logprobs import logprobs_object, tokens_of
from llamaq.producer.openai_format.request_body import GenerationBody, read_body, read_flag, read_model
from llamaq.producer.openai_format.response_body import completion_id, completion_object, timings_object
from llamaq.producer.openai_format.stream_chunks import StreamChunks
from llamaq.producer.openai_format.tools import form_options, message_of


async def chat(request: Request) -> Response:
    """Answer a chat."""
    return await _generate(request, Endpoint.CHAT)


async def complete(request: Request) -> Response:
    """Continue a text."""
    return await _generate(request, Endpoint.COMPLETIONS)


async def _generate(request: Request, endpoint: Endpoint) -> Response:
    context = context_of(request)
    fields = await read_object(request)
    client = await queue_for(request, read_model(fields), is_kept=read_flag(fields, "store"))
    body = read_body(endpoint, await with_tokens(client, fields))
    echoed = await _read_echoed(client, body)
    form, may_reason = CONTENT_ALONE, fields.get("reasoning_format") != "none"
    if endpoint is Endpoint.CHAT:
        form = await context.forms.of(client, body.jobs[0], may_reason=may_reason)
    more = form_options(form, body.tool_choice, body.jobs[0])
    generation = generation_for(request, client, [job | more for job in body.jobs], is_kept=body.is_stored)
    splitters = [splitter for _ in body.jobs if (splitter := form.splitter()) is not None]
    model = body.model or client.queue
    async with explaining_long_prompts(context, generation):
        if not body.is_streamed:
            results = await generation.results()
            answer = await _answer(context, generation, body, results, model, echoed, splitters)
            return json_response(answer | await verbose_fields(context, fields, generation, results[0], model))
        await generation.start()
        return await EventStream.open(
            _events(generation, body, model, echoed, context.pieces, splitters),
            comment=generation.describe_wait,
            ping_s=context.settings.ping_s,
        )


async def _logprobs(
    body: GenerationBody,
    client: AsyncClient,
    known: TokenPieces,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    offset: int = 0,
) -> dict[str, Any]:
    """Return the object `logprobs` of some tokens, `offset` characters after the beginning of the text."""
    pieces = await known.of(client, tokens_of(tokens, logprobs))
    return logprobs_object(body.endpoint, tokens, logprobs, pieces, offset)


async def _read_echoed(client: AsyncClient, body: GenerationBody) -> list[str]:
    """Return the prompts as texts, if the answer begins with them."""
    if not body.is_echoed:
        return []
    return [job["prompt"] if "prompt" in job else await client.detokenize(job["tokens"]) for job in body.jobs]


async def _answer(
    context: Context,
    generation: Generation,
    body: GenerationBody,
    results: Sequence[Result],
    model: str,
    echoed: Sequence[str],
    splitters: Sequence[AnswerSplitter],
) -> dict[str, Any]:
    """Return the whole answer."""
    logprobs = [
        await _logprobs(body, generation.client, context.pieces, result.tokens, result.logprobs)
        for result in results
        if result.logprobs is not None
    ]
    messages = [
        message_of([*splitter.feed(result.text), *splitter.finish()], result.job_id)
        for splitter, result in zip(splitters, results, strict=False)
    ]
    answer = completion_object(
        body.endpoint,
        *results,
        model=model,
        created_s=int(time.time()),
        n=body.n,
        echoed=echoed,
        logprobs=logprobs,
        messages=messages,
    )
    return answer | {"system_fingerprint": FINGERPRINT, "timings": timings_object(results[0].stats)}


async def _events(
    generation: Generation,
    body: GenerationBody,
    model: str,
    echoed: Sequence[str],
    known: TokenPieces,
    splitters: Sequence[AnswerSplitter],
) -> Events:
    """Yield the encoded chunks of a streamed answer."""
    answer_id = completion_id(body.endpoint, generation.streams[0].job.id)
    chunks = StreamChunks(body.endpoint, answer_id, model, int(time.time()), FINGERPRINT)
    describe = partial(_logprobs, body, generation.client, known)
    choices = [
        ChoiceStream(
            chunks,
            index,
            stream.job.id,
            echoed[index] if echoed else "",
            splitters[index] if splitters else None,
            describe,
        )
        for index, stream in enumerate(generation.streams)
    ]
    results: dict[int, Result] = {}
    pieces = generation.pieces()
    try:
        async for index, piece in pieces:
            if events := await choices[index].events_of(piece):
                yield events
            if isinstance(piece, Result):
                results[index] = piece
    finally:
        await pieces.aclose()
    if body.has_usage_chunk:
        yield data(chunks.usage([results[index] for index in sorted(results)], body.n))
    yield DONE
