"""Finds the part of a chat's prompt that belongs to its system messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.chat import Message, TemplateOptions
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.core.packed_tokens import common_prefix, pack

CACHE_SIZE = 32
"""Number of lists of system messages whose tokens are cached."""


class SystemPrefixFinder:
    """Finds the tokens that every chat with the same system messages starts with. Thread-safe.

    Args:
        vocab: The model's vocabulary, with its chat template.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._prefix_of = lru_cache(maxsize=CACHE_SIZE)(self._find_prefix)

    def n_tokens(self, messages: Sequence[Message], options: TemplateOptions, prompt: Sequence[int]) -> int:
        """Return the number of prompt tokens of the system messages, including template text around them.

        Args:
            messages: The messages of the chat.
            options: The options of the chat template.
            prompt: The tokens of the chat.
        """
        system = tuple(takewhile(lambda message: message.role == "system", messages))
        return common_prefix(pack(prompt), self._prefix_of(system, options)) if system else 0

    def _find_prefix(self, system: tuple[Message, ...], options: TemplateOptions) -> bytes:
        """Return the packed tokens that every chat with these system messages starts with.

        They are the common prefix of two chats with different user messages.
        """
        try:
            options = replace(options, continue_final_message=False)
            users = [Message(role="user", content=text) for text in "ab"]
            first, second = (self._vocab.encode_chat([*system, user], options) for user in users)
        except JobRejected:
            return b""
        return pack(first[: common_prefix(pack(first), pack(second))])
