"""Rewrites a chat for templates that accept only one system message, at the beginning.

The templates of Qwen's models raise an error for any other system message. Agents send several: Codex sends messages of
the developer after the instructions, and Claude Code sends system messages during the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from llamaq.common.protocol.chat import Message

REMINDER = "<system-reminder>\n{}\n</system-reminder>"
"""A later system message as text of the user. The tag is the one that Claude Code uses for such texts."""


def with_one_system_message(messages: Sequence[Message]) -> list[Message] | None:
    """Return the chat with at most one system message. None: the chat is already such a chat.

    System messages at the beginning become one message. A later one becomes text of the user at the same place, so that
    the prompt up to this place, which a prefix cache may hold, stays the same. This text and the messages of the user
    beside it become one message, because some templates require that the roles alternate.
    """
    leading = list(takewhile(_is_system, messages))
    rest = messages[len(leading) :]
    if len(leading) < 2 and not any(map(_is_system, rest)):
        return None
    chat = [_joined(leading)] if leading else []
    is_after_reminder = False
    for message in rest:
        is_reminder = _is_system(message)
        added = _as_reminder(message) if is_reminder else message
        if (is_reminder or is_after_reminder) and chat and chat[-1].role == added.role == "user":
            chat[-1] = _joined([chat[-1], added])
        else:
            chat.append(added)
        is_after_reminder = is_reminder
    return chat


def _as_reminder(message: Message) -> Message:
    return message.model_copy(update={"role": "user", "content": REMINDER.format(message.content)})


def _is_system(message: Message) -> bool:
    return message.role == "system"


def _joined(messages: Sequence[Message]) -> Message:
    """Return the first message with the contents of all, separated by empty lines."""
    return messages[0].model_copy(update={"content": "\n\n".join(message.content for message in messages)})
