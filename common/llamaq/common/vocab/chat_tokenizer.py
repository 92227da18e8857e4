"""Turns chats into tokens: text of a special token that a message contains does not become this token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.chat import Message, TemplateOptions
from llamaq.common.vocab.special_token_masking import MaskedMessages, Placeholders, SpecialTokenFinder
from llamaq.common.vocab.text_tokenizer import TextTokenizer


class ChatTokenizer:
    """Turns the chats of one model into tokens.

    The chat template gets placeholders for the texts of special tokens in contents, reasoning and the arguments of
    calls, and for edges of contents and reasoning that could be parts of such a text. So it prints these parts, but
    cannot look for them or change them.

    Only the tags of reasoning in the assistant's contents are shown to a template that does more with them than to
    print them: it may leave out the reasoning. Each of these tags in its result is the special token.

    Args:
        tokenizer: The tokenizer of the model.
        render: Returns a chat as text, rendered by the model's chat template.
    """

    def __init__(self, tokenizer: TextTokenizer, render: Callable[[Sequence[Message], TemplateOptions], str]) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = tokenizer.special_tokens
        self._render = render

    def encode(self, messages: Sequence[Message], options: TemplateOptions, max_tokens: int | None) -> list[int]:
        """Return the tokens of a chat. Args and Raises: as in `Vocab.encode_chat`."""
        _refuse_special_texts(messages, options, self._special_tokens)
        masked = MaskedMessages(messages, self._special_tokens)
        rendered = self._render(masked.without_special_texts(), options)
        if not masked.placeholders.originals:
            return self._tokenizer.encode(rendered, max_tokens=max_tokens)
        # If no content, reasoning or argument has a special text, placeholders stand only for the beginnings and ends
        # of contents and reasoning. If the chat without placeholders has no additional special text, no beginning or
        # end is part of a special text. Then the placeholders are not needed.
        if not masked.has_special_texts:
            plain = self._render(messages, options)
            if len(self._special_tokens.find(plain)) == len(self._special_tokens.find(rendered)):
                return self._tokenizer.encode(plain, max_tokens=max_tokens)
        rendered = self._show_reasoning_tags(rendered, masked, options)
        return self._tokenize_masked(rendered, masked.placeholders, max_tokens)

    def _show_reasoning_tags(self, rendered: str, masked: MaskedMessages, options: TemplateOptions) -> str:
        """Return the chat rendered with its tags of reasoning, or `rendered` if the template only prints these tags."""
        shown = masked.with_reasoning_tags()
        if shown is None:
            return rendered
        with_tags, restore = self._render(shown, options), masked.placeholders.restore
        return rendered if restore(with_tags) == restore(rendered) else with_tags

    def _tokenize_masked(self, rendered: str, placeholders: Placeholders, max_tokens: int | None) -> list[int]:
        """Return the tokens of a rendered chat, in which the replaced parts are text."""
        self._tokenizer.check_length(placeholders.restore(rendered), max_tokens)
        tokens: list[int] = []
        for index, (text, parse_special) in enumerate(self._split_at_special_tokens(rendered, placeholders)):
            if index == 0:
                tokens += self._tokenizer.encode(text)
            else:
                tokens += self._tokenizer.encode_part(text, parse_special=parse_special)
        return tokens

    def _split_at_special_tokens(self, rendered: str, placeholders: Placeholders) -> Iterator[tuple[str, bool]]:
        """Split a rendered chat before and after each text between two special tokens that has a replaced part.

        llama.cpp tokenizes the text between two special tokens as a whole, and some vocabularies put a space before it.
        So a replaced part is not tokenized alone, but with all text up to the special tokens around it.

        Yields:
            A part without placeholders, and whether its special texts are special tokens. The first part has no
            replaced parts; it may be empty.
        """
        parsed, last, run, is_masked = "", "", "", False
        for text, is_content in placeholders.split(rendered):
            end = 0
            for span in [] if is_content else self._special_tokens.find(text):
                run, special, end = run + text[end : span.start], text[span.start : span.end], span.end
                if is_masked:
                    yield from ((parsed, True), (self._tokenizer.strip_at_special_tokens(last, run, special), False))
                    parsed, run = "", ""
                parsed, last, run, is_masked = parsed + run + special, special, "", False
            run += text[end:]
            is_masked |= is_content
        if is_masked:
            yield from ((parsed, True), (self._tokenizer.strip_at_special_tokens(last, run, ""), False))
        else:
            yield parsed + run, True


def _refuse_special_texts(
    messages: Sequence[Message], options: TemplateOptions, special_tokens: SpecialTokenFinder
) -> None:
    """Raise `JobRejected` if an option or a field of a message has the text of a special token.

    The contents and the reasoning of messages, and the arguments of calls, may have it.
    """
    _refuse_in("tools", json.loads(options.tools), special_tokens)
    _refuse_in("chat_template_kwargs", json.loads(options.kwargs), special_tokens)
    for message in messages:
        values = message.model_dump(exclude_none=True)
        for call in values.get("tool_calls", ()):
            del call["function"]["arguments"]
        for name, value in values.items():
            if name not in ("role", "content", "reasoning_content"):
                _refuse_in(f"messages: {name}", value, special_tokens)


def _refuse_in(place: str, value: object, special_tokens: SpecialTokenFinder) -> None:
    if any(map(special_tokens.find, _texts_in(value))):
        raise JobRejected(ErrorCode.INVALID_REQUEST, f"{place} contains the text of a special token")


def _texts_in(value: object) -> Iterator[str]:
    """Yield all texts in a value that JSON could contain."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts_in(name)
            yield from _texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts_in(inner)
