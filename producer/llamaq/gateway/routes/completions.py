"""POST /v1/chat/completions and /v1/completions: OpenAI's endpoints that generate text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.text_commands import TextAction
from llamaq.gateway.completions.choice_stream import ChoiceStream
from llamaq.gateway.completions.prompt_probabilities import PromptValueCount, write_off_the_loop
from llamaq.gateway.completions.stream_chunks import StreamChunks
from llamaq.gateway.completions.token_id_fields import TokenIdFields
from llamaq.gateway.context import Context, context_of
from llamaq.gateway.generation import Generation
from llamaq.gateway.http.event_stream import DONE, Events, EventStream, data
from llamaq.gateway.http.json_body import json_response, read_object
from llamaq.gateway.native_format import final_object
from llamaq.gateway.prepared.completion import FINGERPRINT, PreparedCompletion
from llamaq.gateway.progress_fields import ProgressOptions
from llamaq.gateway.prompt_too_long_error import chat_of, explaining_long_prompts
from llamaq.gateway.queue_of_request import generation_for, model_for
from llamaq.producer import AsyncClient, Result
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.request_body import read_flag, read_model
from llamaq.producer.openai_format.response_body import completion_id
from llamaq.producer.queries import text_commands


async def chat(request: Request) -> Response:
    """Answer a chat."""
    return await _generate(request, Endpoint.CHAT)


async def complete(request: Request) -> Response:
    """Continue a text."""
    return await _generate(request, Endpoint.COMPLETIONS)


async def _generate(request: Request, endpoint: Endpoint) -> Response:
    context = context_of(request)
    fields = await read_object(request)
    model = await model_for(request, read_model(fields), is_stored=read_flag(fields, "store"))
    asked = await PreparedCompletion.read(context.models, model.client, endpoint, fields)
    is_kept = asked.body.is_stored and asked.body.is_streamed
    generation = generation_for(request, model, asked.jobs, is_kept=is_kept)
    async with explaining_long_prompts(context, generation):
        if not asked.body.is_streamed:
            results = await generation.results(PromptValueCount().add)
            answer = await asked.answer(results)
            answer |= await _verbose_fields(context, fields, generation, results[0], asked.model)
            scored = [result.prompt_logprobs for result in results]
            return await write_off_the_loop(scored, lambda: json_response(answer))
        await generation.start()
        events = _events(context, generation, asked, ProgressOptions.read(fields))
        return await EventStream.open(events, comment=generation.describe_wait, ping_s=context.settings.ping_s)


async def _events(
    context: Context, generation: Generation, asked: PreparedCompletion, progress: ProgressOptions
) -> Events:
    """Yield the encoded chunks of a streamed answer."""
    async with aclosing(generation):  # also if this ends before the pieces are read
        body = asked.body
        answer_id = completion_id(body.endpoint, generation.streams[0].job.id)
        chunks = StreamChunks(
            body.endpoint, answer_id, asked.model, int(time.time()), FINGERPRINT, has_functions=body.has_functions
        )
        choices: list[ChoiceStream] = []
        results: dict[int, Result] = {}
        async with explaining_long_prompts(context, generation), aclosing(generation.pieces()) as pieces:
            async for index, piece in pieces:
                choices = choices or await _choices(generation, asked, chunks, progress)
                if events := await choices[index].events_of(piece):
                    generation.keep()
                    yield events
                if isinstance(piece, Result):
                    results[index] = piece
        if body.has_usage_chunk:
            ordered = [results[index] for index in sorted(results)]
            yield data(chunks.usage(ordered, body.n, await asked.count_reasoning(ordered)))
        yield DONE


async def _choices(
    generation: Generation, asked: PreparedCompletion, chunks: StreamChunks, progress: ProgressOptions
) -> list[ChoiceStream]:
    """Return the choices of a streamed answer whose first piece has arrived: now there is a worker to ask."""
    echoed, splitters = asked.echoed, asked.splitters()
    prompts = await asked.prompts() if asked.has_token_ids else []
    return [
        ChoiceStream(
            chunks,
            index,
            stream.job.id,
            echoed[index] if echoed else "",
            splitters[index] if splitters else None,
            asked.logprobs,
            asked.fields_of_prompt,
            progress,
            scores_echo=asked.scores_echo,
            token_ids=TokenIdFields(asked.body.endpoint, prompts[index]) if prompts else None,
        )
        for index, stream in enumerate(generation.streams)
    ]


async def _verbose_fields(
    context: Context, fields: Mapping[str, Any], generation: Generation, result: Result, model: str
) -> dict[str, Any]:
    """Return the field `__verbose` if the body `fields` has `verbose`, or if the server's `log_level` is `debug`.

    It has the rendered prompt and the options of the first job, and its `result`, for debugging.
    """
    is_debug = context.settings.log_level == "debug"
    if not read_flag({"verbose": is_debug, **fields}, "verbose"):
        return {}
    request, client = generation.requests[0], generation.client
    card = await context.queues.card(client.queue)
    answer = final_object(result, 0, request=request, card=card, model=model, has_tokens=True)
    prompt = await context.models.reply(client, partial(_rendered_prompt, client, request))
    return {"__verbose": answer | {"prompt": prompt}}


async def _rendered_prompt(client: AsyncClient, request: JobRequest) -> str:
    """Return the prompt of a job as the model reads it."""
    if request.tokens is not None:
        return await client.detokenize(list(request.tokens))
    if request.messages is None:
        return request.prompt or ""
    return (await text_commands.ask(client.connection, TextAction.APPLY_TEMPLATE, None, **chat_of(request))).text
