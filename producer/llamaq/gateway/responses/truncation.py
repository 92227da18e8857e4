"""Shortens a conversation that is longer than the context, for requests with `truncation: "auto"`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Message = dict[str, Any]
CountTokens = Callable[[Sequence[Message]], Awaitable[int]]


async def newest_that_fit(messages: list[Message], limit: int, count_tokens: CountTokens) -> list[Message]:
    """Return the newest messages that have at most `limit` tokens, beginning with a message of the user.

    If even the messages from the last message of the user on do not fit, these messages are returned. Then the job
    fails with the reason.

    Args:
        messages: The conversation.
        limit: Largest number of tokens.
        count_tokens: Returns the number of tokens of a conversation.
    """
    if await count_tokens(messages) <= limit:
        return messages
    starts = [number for number, message in enumerate(messages) if message["role"] == "user" and number > 0]
    if not starts:
        return messages
    first, last = 0, len(starts) - 1
    while first < last:  # a later start has fewer tokens
        middle = (first + last) // 2
        if await count_tokens(messages[starts[middle] :]) <= limit:
            last = middle
        else:
            first = middle + 1
    return messages[starts[first] :]
