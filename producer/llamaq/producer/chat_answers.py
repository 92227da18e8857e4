"""The answers to a chat: the job options for tools and reasoning, and the parts of an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamaq.common.protocol.chat import Message, ToolCall
from llamaq.common.protocol.job_outcome import Result
from llamaq.producer.answer_forms import AnswerForms
from llamaq.producer.answer_parts.answer_format import AnswerForm
from llamaq.producer.answer_parts.parts import Part
from llamaq.producer.job_handle import Chunk
from llamaq.producer.openai_format.tools import form_options, message_of, read_tools
from llamaq.producer.queue_connection import QueueConnection


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a chat, split into its parts."""

    content: str
    """The text for the user. It may be empty if the model calls tools."""
    reasoning: str
    """What the model wrote before it answered. Empty: it did not reason, or its chat template has no reasoning."""
    tool_calls: tuple[ToolCall, ...]
    """The calls of tools, in their order. The arguments are JSON text, which is incomplete if the answer was cut
    off."""
    result: Result
    """The result of the job: tokens, finish reason, stats, and the whole text with its tags."""

    @property
    def message(self) -> Message:
        """The answer as a message, to append to the chat before the messages with the results of its calls."""
        return Message(
            role="assistant",
            content=self.content,
            tool_calls=self.tool_calls or None,
            reasoning_content=self.reasoning or None,
        )


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """How a model writes its answers to a chat. `AsyncClient.chat_answers` returns it."""

    form: AnswerForm
    """How the model writes reasoning and calls of tools."""
    options: Mapping[str, Any]
    """The job options for `chat`, `stream_chat` and `submit`: the given options, and the options that the form
    needs."""

    def read(self, result: Result) -> Answer:
        """Split the text of a job."""
        message = message_of(self.form.splitter().read(result), result.job_id)
        calls = tuple(ToolCall.model_validate(call) for call in message.get("tool_calls", ()))
        return Answer(message["content"] or "", message.get("reasoning_content", ""), calls, result)

    def parts(self, chunks: Iterable[Chunk]) -> Iterator[Part]:
        """Yield the parts of a stream as they arrive. Each part is content, reasoning, or belongs to a call of a
        tool.
        """
        splitter = self.form.splitter()
        for chunk in chunks:
            yield from splitter.feed(chunk.text, chunk.tag_offsets)
        yield from splitter.finish()

    async def async_parts(self, chunks: AsyncIterable[Chunk]) -> AsyncGenerator[Part, None]:
        """Yield the parts of a stream of the asyncio client, like `parts`."""
        splitter = self.form.splitter()
        async for chunk in chunks:
            for part in splitter.feed(chunk.text, chunk.tag_offsets):
                yield part
        for part in splitter.finish():
            yield part


async def read_form(
    forms: AnswerForms,
    connection: QueueConnection,
    messages: Sequence[Message | Mapping[str, Any]],
    options: Mapping[str, Any],
    choice: Mapping[str, Any],
) -> ChatAnswers:
    """Return how a queue's model writes its answers to a chat.

    Args:
        forms: What is known about the forms of answers.
        connection: The connection to the queue.
        messages: The messages of the chat.
        options: The job options, `tools` among them.
        choice: The fields `tool_choice` and `parallel_tool_calls` of the OpenAI API.

    Raises:
        InvalidRequest: The tools or their choice are not valid.
        NoWorker: No worker serves the queue, so its model is not known.
    """
    tools = read_tools({**choice, "tools": options.get("tools")})
    job = {**options, "messages": messages, "tools": tools.tools}
    form = await forms.of(connection, job, is_parallel=tools.is_parallel)
    return ChatAnswers(form, {**options, "tools": tools.tools or None, **form_options(form, tools, job)})
