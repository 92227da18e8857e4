"""Refuses chats that have the text of a special token where the chat template would make this token of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.chat import Message, TemplateOptions
from llamaq.common.vocab.special_token_masking import SpecialTokenFinder


def refuse_special_texts(
    messages: Sequence[Message], options: TemplateOptions, special_tokens: SpecialTokenFinder
) -> None:
    """Raise `JobRejected` if an option or a field of a message has the text of a special token.

    The contents of messages and the arguments of calls may have it: `MaskedMessages` hides them from the template.
    """
    _refuse_in("tools", json.loads(options.tools), special_tokens)
    _refuse_in("chat_template_kwargs", json.loads(options.kwargs), special_tokens)
    for message in messages:
        values = message.model_dump(exclude_none=True)
        for call in values.get("tool_calls", ()):
            del call["function"]["arguments"]
        for name, value in values.items():
            if name not in ("role", "content"):
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
