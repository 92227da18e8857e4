"""Hides the texts of special tokens in the messages of a chat from the chat template that renders the messages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.answer_tags import MISTRAL_THINK_CLOSE, MISTRAL_THINK_OPEN, THINK_CLOSE, THINK_OPEN
from llamaq.common.protocol.chat import Message, arguments_as_object
from llamaq.common.vocab.special_token_masking import Placeholders, Span, SpecialTokenFinder

# The tags that chat templates look for in the assistant's earlier messages, to leave out its reasoning. None of them
# begins or ends a message.
REASONING_TAGS = (THINK_OPEN, THINK_CLOSE, MISTRAL_THINK_OPEN, MISTRAL_THINK_CLOSE)


class MaskedMessages:
    """The messages of a chat, with placeholders for what could become a special token in the rendered chat.

    Args:
        messages: The messages, from the oldest to the newest.
        special_tokens: Finds the texts of the model's special tokens.

    Raises:
        JobRejected: The arguments of a call are nested too deeply.
    """

    def __init__(self, messages: Sequence[Message], special_tokens: SpecialTokenFinder) -> None:
        self._special_tokens = special_tokens
        self.placeholders = Placeholders()
        self._messages = list(map(self._mask_arguments, messages))
        self._spans_of = [special_tokens.find(message.content) for message in messages]
        self.has_special_texts = bool(self.placeholders.originals) or any(self._spans_of)
        """Whether a content or an argument has the text of a special token. Parts of such texts do not count."""

    def without_special_texts(self) -> list[Message]:
        """Return the messages with placeholders for special texts, and for parts of them at the edges of contents."""
        return list(map(self._mask_content, self._messages, self._spans_of))

    def with_reasoning_tags(self) -> list[Message] | None:
        """Return the messages as `without_special_texts` does, but with the tags of reasoning in the assistant's ones.

        Returns:
            None if the assistant's messages have no such tag that is a special text.
        """
        tags_of = list(map(_reasoning_tags, self._messages, self._spans_of))
        return list(map(self._mask_content, self._messages, self._spans_of, tags_of)) if any(tags_of) else None

    def _mask_arguments(self, message: Message) -> Message:
        """Replace the special texts in the arguments of calls. In a JSON text, escapes may hide such a text."""

        def mask(text: str) -> str:
            return self.placeholders.replace(text, self._special_tokens.find(text))

        calls = []
        for call in message.tool_calls or ():
            try:
                arguments = _map_texts(mask, arguments_as_object(call.function.arguments))
            except RecursionError as exc:
                reason = "messages: the arguments of a call are nested too deeply"
                raise JobRejected(ErrorCode.INVALID_REQUEST, reason) from exc
            function = call.function.model_copy(update={"arguments": arguments})
            calls.append(call.model_copy(update={"function": function}))
        return message.model_copy(update={"tool_calls": tuple(calls)}) if calls else message

    def _mask_content(self, message: Message, spans: Sequence[Span], shown: Sequence[Span] = ()) -> Message:
        """Replace the special texts at `spans` in the content, and parts of special texts at its edges.

        The special texts at `shown` stay. A template may leave them out and join what is around them, so the parts of
        special texts next to them are replaced too.
        """
        content = message.content
        masked = sorted(set(spans) - set(shown))
        bounds = [0, *chain.from_iterable(shown), len(content)]
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            for edge in self._special_tokens.find_at_edges(content[start:end]):
                moved = Span(start + edge.start, start + edge.end)
                if not _overlaps(moved, spans):
                    masked.append(moved)
        if not masked:
            return message
        return message.model_copy(update={"content": self.placeholders.replace(content, sorted(masked))})


def _reasoning_tags(message: Message, spans: Sequence[Span]) -> list[Span]:
    """Return those spans that are tags of reasoning, for a message of the assistant. A user's text never shows."""
    if message.role != "assistant":
        return []
    return [span for span in spans if message.content[span.start : span.end] in REASONING_TAGS]


def _overlaps(part: Span, spans: Sequence[Span]) -> bool:
    """Return whether a part of a text has a character in common with one of the spans, which are in order."""
    index = bisect_left(spans, (part.end, 0)) - 1  # the last span that starts before the end of the part
    return index >= 0 and spans[index].end > part.start


def _map_texts(change: Callable[[str], str], value: Any) -> Any:
    """Return a value of JSON in which each text, also each name, is replaced by what `change` returns for it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _map_texts(change, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(change, inner) for inner in value]
    return value
