"""Finds out in which form a queue's model writes its answers, and whether the prompt already begins the reasoning."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from llamaq.common.errors import LlamaqError
from llamaq.common.protocol.queue_and_worker_state import WorkerCard
from llamaq.common.protocol.text_commands import TextAction
from llamaq.producer.answer_parts.answer_format import CONTENT_ALONE, AnswerForm, form_of
from llamaq.producer.openai_format.tools import has_free_constraint
from llamaq.producer.queries import text_commands
from llamaq.producer.queue_connection import QueueConnection

MAX_KNOWN = 256
ASK_TIMEOUT_S = 5.0
PROBE = "llamaq-probe"
"""End of the last message that a template renders as a test. The beginning of the answer follows it."""
SIGNS = {"is_tool": "tool", "/no_think": "think"}
"""Maps a text in templates (DeepSeek, Nemotron) that begin some answers differently to a word in such chats."""


class AnswerForms:
    """The forms of answers. A worker is asked once for each template and its variables, or for each chat.

    Args:
        card: Returns the card of a worker of a queue. None: no worker of the queue is known.
    """

    def __init__(self, card: Callable[[str], Awaitable[WorkerCard | None]]) -> None:
        self._card = card
        self._beginnings: dict[tuple[str, bytes], str] = {}
        """Maps a chat template and the digest of its variables, which may be large, to the beginning of the answer."""

    def __repr__(self) -> str:
        return f"<AnswerForms of {len(self._beginnings)} templates>"

    async def of(
        self,
        connection: QueueConnection,
        job: Mapping[str, Any],
        *,
        is_parallel: bool = True,
        may_reason: bool = True,
    ) -> AnswerForm:
        """Return the form of the answer to a chat.

        Args:
            connection: The connection to the queue.
            job: The arguments of `submit`.
            is_parallel: Whether the answer may have several calls.
            may_reason: Whether reasoning is separated from the content. False: it is part of the content.
        """
        tools, is_free = job.get("tools") or (), has_free_constraint(job)
        if is_free and not tools:
            return CONTENT_ALONE
        card = await self._card(connection.settings.queue)
        template, tag_tokens = (None, {}) if card is None else (card.chat_template, card.tag_tokens)
        form = form_of(
            template,
            tools=tools,
            is_parallel=is_parallel,
            may_reason=may_reason and not is_free,
            tag_tokens=tag_tokens,
        )
        if not form.reasoning_tags:
            return form
        if job.get("continue_final_message"):
            last = dict(job["messages"][-1])  # a `Message`, or an object of its fields
            content = last.get("content") or ""
            if last.get("reasoning_content") and not content.strip():
                return form.model_copy(update={"starts_in_reasoning": True, "has_begun": True})
            return form.after(content)
        if not form.reasoning_open:
            return form
        return form.after(await self._beginning(connection, template or "", job))

    async def _beginning(self, connection: QueueConnection, template: str, job: Mapping[str, Any]) -> str:
        kwargs, messages = job.get("chat_template_kwargs") or {}, job["messages"]
        key = (template, sha256(json.dumps(kwargs, sort_keys=True).encode()).digest())
        # Without a reply, or if the messages are not valid, the job itself will tell what is wrong.
        with suppress(LlamaqError, TypeError, ValueError):
            said = [value for message in messages for value in dict(message).values() if value]
            if any(sign in template and word in str(said) for sign, word in SIGNS.items()):
                return await self._ask(connection, kwargs, messages, job.get("tools"))
            if key not in self._beginnings:
                if len(self._beginnings) >= MAX_KNOWN:
                    self._beginnings.clear()
                self._beginnings[key] = await self._ask(connection, kwargs, [{"role": "user"}])
            return self._beginnings[key]
        return ""

    async def _ask(
        self, connection: QueueConnection, kwargs: Mapping[str, Any], messages: Sequence[Any], tools: Any = None
    ) -> str:
        *earlier, last = messages
        last = dict(last)
        reply = await text_commands.ask(
            connection,
            TextAction.APPLY_TEMPLATE,
            ASK_TIMEOUT_S,
            messages=[*earlier, {**last, "content": f"{last.get('content') or ''}{PROBE}"}],
            chat_template_kwargs=dict(kwargs),
            tools=tools or None,
        )
        return reply.text.rpartition(PROBE)[2]
