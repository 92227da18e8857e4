"""Finds the texts of special tokens in chat messages, so that message content never becomes a special token.

`MaskedMessages` hides these texts from the chat template that renders the messages.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.answer_tags import MISTRAL_THINK_CLOSE, MISTRAL_THINK_OPEN, THINK_CLOSE, THINK_OPEN
from llamaq.common.protocol.chat import Message, arguments_as_object
from llamaq.common.protocol.wire_model import MAX_JSON_DEPTH

REASONING_TAGS = (THINK_OPEN, THINK_CLOSE, MISTRAL_THINK_OPEN, MISTRAL_THINK_CLOSE)
"""The tags that chat templates look for in the assistant's earlier messages, to leave out its reasoning. None of them
begins or ends a message."""


class Span(NamedTuple):
    """The characters [start, end) of a text."""

    start: int
    end: int


class SpecialTokenFinder:
    """Finds the texts of a model's special tokens in other texts.

    Args:
        texts: The texts of the special tokens, such as `<|im_end|>`. Empty texts are ignored.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        self._joined = "\n".join(self.texts)  # one search finds a text that is a part of any special text
        self._pattern = re.compile(_pattern_of(self.texts) or "(?!)")
        self._max_length = max(map(len, self.texts), default=0)
        self._proper_prefixes = {text[:n] for text in self.texts for n in range(1, len(text))}
        self._proper_suffixes = {text[n:] for text in self.texts for n in range(1, len(text))}

    def find(self, text: str) -> list[Span]:
        """Return the special texts in `text`, from left to right and without overlap.

        If several special texts start at the same character, only the longest is returned.
        """
        return [Span(*match.span()) for match in self._pattern.finditer(text)]

    def find_at_edges(self, text: str) -> list[Span]:
        """Return the parts at both ends of `text` that the surrounding text could complete to a special text.

        White space around `text` is ignored, because many chat templates remove it.
        """
        n_leading = len(text) - len(text.lstrip())
        core = text.strip()
        end = n_leading + len(core)
        if not core:
            return []
        if core in self._joined:
            return [Span(n_leading, end)]
        lengths = range(min(self._max_length, len(core)), 0, -1)
        n_suffix = next((n for n in lengths if core[:n] in self._proper_suffixes), 0)
        n_prefix = next((n for n in lengths if core[-n:] in self._proper_prefixes), 0)
        spans = Span(n_leading, n_leading + n_suffix), Span(max(end - n_prefix, n_leading + n_suffix), end)
        return [span for span in spans if span.start < span.end]


def _pattern_of(texts: Iterable[str]) -> str:
    """Return a pattern for the longest of these texts, which compares equal beginnings once."""
    ordered = sorted(texts, reverse=True)
    if len(ordered) < 2:
        return re.escape("".join(ordered))
    groups = groupby(ordered, lambda text: text[:1])
    return f"(?:{'|'.join(re.escape(first) + _pattern_of(text[1:] for text in group) for first, group in groups)})"


class Placeholders:
    """Replaces parts of message contents by random words while the chat template renders the messages."""

    def __init__(self) -> None:
        self.originals: list[str] = []
        """The replaced parts. The number in a placeholder is the index of its part in this list."""
        self._nonce = secrets.token_hex(12)
        # A template may change the case of a content. A special token's text keeps its own case then.
        self._pattern = re.compile(f"m{self._nonce}x([0-9]+)x", re.IGNORECASE)
        self._halves = self._nonce[:12], self._nonce[12:]

    def replace(self, content: str, spans: Sequence[Span]) -> str:
        """Return `content` with a placeholder in place of each span."""
        parts: list[str] = []
        end = 0
        for span in spans:
            parts += content[end : span.start], f"m{self._nonce}x{len(self.originals)}x"
            self.originals.append(content[span.start : span.end])
            end = span.end
        return "".join((*parts, content[end:]))

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Split a rendered chat at its placeholders.

        Yields:
            A part of the text, and whether it was replaced. Joined, the parts are the rendered chat
            without placeholders.

        Raises:
            JobRejected: The template took a placeholder apart.
        """
        for index, part in enumerate(self._pattern.split(rendered)):
            is_content = index % 2 == 1
            if not is_content and any(half in part.lower() for half in self._halves):
                reason = "the model's chat template cuts a content inside the text of a special token"
                raise JobRejected(ErrorCode.CHAT_TEMPLATE, reason)
            yield (self.originals[int(part)] if is_content else part), is_content

    def restore(self, rendered: str) -> str:
        """Return a rendered chat with the replaced parts in place of the placeholders. Raises: as in `split`."""
        return "".join(text for text, _ in self.split(rendered))


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
        self._reasoning_spans_of = [special_tokens.find(message.reasoning_content or "") for message in messages]
        self.has_special_texts = any((self.placeholders.originals, *self._spans_of, *self._reasoning_spans_of))
        """Whether a content, reasoning or argument has the text of a special token. A part of one does not count."""

    def without_special_texts(self) -> list[Message]:
        """Return the messages with placeholders for special texts, and for parts of them at the edges."""
        return list(map(self._mask_message, self._messages, self._reasoning_spans_of, self._spans_of))

    def with_reasoning_tags(self) -> list[Message] | None:
        """Return the messages as `without_special_texts` does, but with the tags of reasoning in the assistant's ones.

        Returns:
            None if the assistant's messages have no such tag that is a special text.
        """
        tags_of = list(map(_reasoning_tags, self._messages, self._spans_of))
        if not any(tags_of):
            return None
        return list(map(self._mask_message, self._messages, self._reasoning_spans_of, self._spans_of, tags_of))

    def _mask_arguments(self, message: Message) -> Message:
        """Replace the special texts in the arguments of calls. In a JSON text, escapes may hide such a text."""

        def mask(text: str) -> str:
            return self.placeholders.replace(text, self._special_tokens.find(text))

        calls = []
        for call in message.tool_calls or ():
            arguments = _map_texts(mask, arguments_as_object(call.function.arguments))
            function = call.function.model_copy(update={"arguments": arguments})
            calls.append(call.model_copy(update={"function": function}))
        return message.model_copy(update={"tool_calls": tuple(calls)}) if calls else message

    def _mask_message(
        self, message: Message, reasoning_spans: Sequence[Span], spans: Sequence[Span], shown: Sequence[Span] = ()
    ) -> Message:
        """Mask the content, in which the special texts at `shown` stay, and the reasoning."""
        changed = {"content": self._mask(message.content, spans, shown)}
        if reasoning := message.reasoning_content:
            changed["reasoning_content"] = self._mask(reasoning, reasoning_spans)
        return message.model_copy(update=changed)

    def _mask(self, text: str, spans: Sequence[Span], shown: Sequence[Span] = ()) -> str:
        """Replace the special texts at `spans`, and parts of special texts at the edges of the text.

        The special texts at `shown` stay. A template may leave them out and join what is around them, so the parts of
        special texts next to them are replaced too.
        """
        masked = sorted(set(spans) - set(shown))
        bounds = [0, *chain.from_iterable(shown), len(text)]
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            for edge in self._special_tokens.find_at_edges(text[start:end]):
                moved = Span(start + edge.start, start + edge.end)
                if not _overlaps(moved, spans):
                    masked.append(moved)
        return self.placeholders.replace(text, sorted(masked))


def _reasoning_tags(message: Message, spans: Sequence[Span]) -> list[Span]:
    """Return those spans that are tags of reasoning, for a message of the assistant. A user's text never shows."""
    if message.role != "assistant":
        return []
    return [span for span in spans if message.content[span.start : span.end] in REASONING_TAGS]


def _overlaps(part: Span, spans: Sequence[Span]) -> bool:
    """Return whether a part of a text has a character in common with one of the spans, which are in order."""
    index = bisect_left(spans, (part.end, 0)) - 1  # the last span that starts before the end of the part
    return index >= 0 and spans[index].end > part.start


def _map_texts(change: Callable[[str], str], arguments: Any, depth: int = 0) -> Any:
    """Return arguments in which each text, also each name, is replaced by what `change` returns for it.

    Raises:
        JobRejected: The arguments are nested too deeply. How deep Python itself can recurse depends on its version.
    """
    if depth > MAX_JSON_DEPTH:
        reason = f"messages: the arguments of a call are nested too deeply: more than {MAX_JSON_DEPTH} levels"
        raise JobRejected(ErrorCode.INVALID_REQUEST, reason)
    if isinstance(arguments, str):
        return change(arguments)
    if isinstance(arguments, Mapping):
        return {change(name): _map_texts(change, inner, depth + 1) for name, inner in arguments.items()}
    if isinstance(arguments, list | tuple):
        return [_map_texts(change, inner, depth + 1) for inner in arguments]
    return arguments
