"""Where `llamaq generate` and `llamaq chat` get their answers from: a queue in Redis, or an HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from llamaq.producer import Client, FinishReason, Result, Stream

Messages = list[dict[str, str]]
Options = dict[str, Any]


class AnswerStream(AbstractContextManager["AnswerStream"], Protocol):
    """A streamed answer. Leaving its context early cancels the job."""

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces of the text."""

    def finish_reason(self) -> FinishReason | None:
        """Return why the answer has ended. None: it is not known."""


class WholeAnswer(NamedTuple):
    """An answer that is complete."""

    text: str
    json: str
    """The whole object, as one line of JSON."""
    finish_reason: FinishReason | None


class Answers(AbstractContextManager["Answers"], Protocol):
    """Answers texts and chats with the options of a job."""

    def stream_text(self, prompt: str, options: Options) -> AnswerStream:
        """Begin to continue a text."""

    def stream_chat(self, messages: Messages, options: Options) -> AnswerStream:
        """Begin to answer a chat."""

    def whole_text(self, prompt: str, options: Options) -> WholeAnswer:
        """Continue a text."""

    def whole_chat(self, messages: Messages, options: Options) -> WholeAnswer:
        """Answer a chat."""


class QueueAnswers:
    """The answers of the workers of a queue. It closes the client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def stream_text(self, prompt: str, options: Options) -> AnswerStream:
        """Begin to continue a text."""
        return QueueStream(self._client.stream(prompt, **options))

    def stream_chat(self, messages: Messages, options: Options) -> AnswerStream:
        """Begin to answer a chat."""
        return QueueStream(self._client.stream_chat(messages, **options))

    def whole_text(self, prompt: str, options: Options) -> WholeAnswer:
        """Continue a text."""
        return _whole(self._client.generate(prompt, **options))

    def whole_chat(self, messages: Messages, options: Options) -> WholeAnswer:
        """Answer a chat."""
        return _whole(self._client.chat(messages, **options))


def _whole(result: Result) -> WholeAnswer:
    return WholeAnswer(result.text, result.model_dump_json(), result.finish_reason)


class QueueStream:
    """The answer of a job in a queue."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.close()

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces of the text."""
        for chunk in self._stream:
            yield chunk.text

    def finish_reason(self) -> FinishReason | None:
        """Return why the job has ended."""
        return self._stream.job.status().finish_reason
