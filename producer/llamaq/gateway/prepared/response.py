"""Requests of OpenAI's Responses API: the conversation that they continue, their job, and their answer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from llamaq.common.errors import InvalidRequest, JobNotFound
from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.job_request import MAX_MESSAGES
from llamaq.common.protocol.text_commands import TextAction
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.responses.answer_reader import answer_message, read_response
from llamaq.gateway.responses.input_items import Messages
from llamaq.gateway.responses.record import ResponseRecord, ResponseStore, missing
from llamaq.gateway.responses.request_body import ResponseBody
from llamaq.producer import AsyncClient, Result
from llamaq.producer.openai_format.chat_messages import TEMPLATE_FIELDS
from llamaq.producer.openai_format.tools import form_options
from llamaq.producer.queries import text_commands

ANSWER_SHARE = 0.5
"""Largest share of the context that a shortened conversation leaves for the answer."""


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A request of `/v1/responses`."""

    models: ModelKnowledge
    record: ResponseRecord
    """What is stored about the response, if the request asks for that."""
    jobs: Sequence[dict[str, Any]]
    """The arguments of `submit` for the only job."""

    n_choices = 1

    @classmethod
    async def read(
        cls,
        models: ModelKnowledge,
        client: AsyncClient,
        body: ResponseBody,
        history: Messages,
        owner: str | None,
    ) -> Self:
        """Return the job of a request.

        Args:
            models: What is known about the models.
            client: The client of the queue.
            body: The body of the request.
            history: The conversation before the messages of the request.
            owner: Name of the API key. None: the server requires none.

        Raises:
            InvalidRequest: A field is not valid. The message names it.
            LlamaqError: The request needs a worker, and none has replied.
        """
        messages = conversation_of(body, history)
        values = {**body.options, "messages": messages}
        values["messages"] = await _prompt_of(models.queues, client, body, messages)
        form = await models.forms.of(client.connection, values, is_parallel=body.tool_choice.is_parallel)
        record = ResponseRecord(
            model=body.model or client.queue,
            created_s=int(time.time()),
            owner=owner,
            is_background=body.is_background,
            messages=messages,
            n_new=len(body.messages),
            form=form,
            has_logprobs="logprobs" in body.options,
            shown=body.shown,
        )
        return cls(models, record, [values | form_options(form, body.tool_choice, values)])

    async def answer(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the response."""
        (result,) = results
        return await read_response(self.models, result.job_id, self.record, result)


async def read_history(
    store: ResponseStore, queues: QueueDirectory, previous_id: str | None, owner: str | None
) -> Messages:
    """Return the conversation up to the answer of an earlier response.

    Args:
        store: The stored responses.
        queues: The queues.
        previous_id: The id of the earlier response. None: the conversation begins here.
        owner: Name of the API key that asks. None: the server requires none.

    Raises:
        RequestRefused: There is no such response.
        InvalidRequest: It has not ended, or has no answer.
    """
    if previous_id is None:
        return []
    job_id, record = await store.read(previous_id, owner)
    job = queues.default.job(job_id)
    try:
        if (await job.status()).state is not JobState.FINISHED:
            raise InvalidRequest("previous_response_id: that response has not ended, or has failed")
        return [*record.messages, answer_message(job_id, record, await job.result())]
    except JobNotFound as exc:
        raise missing(previous_id) from exc


def conversation_of(body: ResponseBody, history: Messages) -> Messages:
    """Return the conversation with the messages of a request. With `truncation: "auto"`, its oldest turns are left out
    if it has too many messages, but no message of the request.

    Raises:
        InvalidRequest: With the instructions, it has too many messages.
    """
    messages = [*history, *body.messages]
    n_too_many = len(body.instructions) + len(messages) - MAX_MESSAGES
    if n_too_many <= 0:
        return messages
    n_kept = _count_leading_system_messages(messages)
    starts = _starts_of_turns(messages, n_kept)
    fitting = [start for start in starts if n_kept + n_too_many <= start <= len(history)]
    if not body.is_truncated or not fitting:
        n_messages = MAX_MESSAGES + n_too_many
        raise InvalidRequest(
            f"input: with instructions and earlier responses, {n_messages} messages are more than {MAX_MESSAGES}"
        )
    return messages[:n_kept] + messages[fitting[0] :]


def _count_leading_system_messages(messages: Messages) -> int:
    """Return the number of system messages with which a conversation begins. A shortened one keeps them."""
    return next((number for number, message in enumerate(messages) if message["role"] != "system"), len(messages))


def _starts_of_turns(messages: Messages, n_kept: int) -> list[int]:
    """Return the places of the messages of the user with which a shortened conversation may begin.

    Args:
        messages: The conversation.
        n_kept: Number of messages at its beginning that are kept.
    """
    return [number for number, message in enumerate(messages) if message["role"] == "user" and number > n_kept]


async def count_tokens(client: AsyncClient, body: ResponseBody, messages: Sequence[dict[str, Any]]) -> int:
    """Return how many tokens the prompt of a response has. A worker of the queue counts them."""
    template = {name: body.options[name] for name in TEMPLATE_FIELDS & body.options.keys()}
    chat = [*body.instructions, *messages]
    reply = await text_commands.ask(client.connection, TextAction.TOKENIZE, None, messages=chat, **template)
    return len(reply.tokens)


async def _prompt_of(queues: QueueDirectory, client: AsyncClient, body: ResponseBody, messages: Messages) -> Messages:
    """Return the messages of the job: the instructions, and the conversation or, if it is too long, its newest part."""
    workers = (await queues.served()).get(client.queue)
    if not body.is_truncated or not workers:
        return [*body.instructions, *messages]
    context = min(worker.card.context_limit for worker in workers)
    n_answer = int(context * ANSWER_SHARE)
    if isinstance(wanted := body.options.get("max_tokens"), int) and wanted > 0:
        n_answer = min(wanted, n_answer)
    return [
        *body.instructions,
        *await _newest_that_fit(messages, context - n_answer, partial(count_tokens, client, body)),
    ]


async def _newest_that_fit(messages: Messages, limit: int, count: Callable[[Messages], Awaitable[int]]) -> Messages:
    """Return the newest messages that have at most `limit` tokens, beginning with a message of the user.

    The system messages at the beginning of the conversation come before them and are counted too. If even the messages
    from the last message of the user on do not fit, these messages are returned. Then the job fails with the reason.

    Args:
        messages: The conversation.
        limit: Largest number of tokens.
        count: Returns the number of tokens of a conversation.
    """
    if await count(messages) <= limit:
        return messages
    n_kept = _count_leading_system_messages(messages)
    starts = _starts_of_turns(messages, n_kept)
    if not starts:
        return messages
    first, last = 0, len(starts) - 1
    while first < last:  # a later start has fewer tokens
        middle = (first + last) // 2
        if await count(messages[:n_kept] + messages[starts[middle] :]) <= limit:
            last = middle
        else:
            first = middle + 1
    return messages[:n_kept] + messages[starts[first] :]
