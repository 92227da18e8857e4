"""Executes the text commands of clients: tokenize, detokenize and apply the chat template."""

from __future__ import annotations

import asyncio

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.text_commands import TextAction, TextCommand, TextReply
from llamaq.common.vocab.llama_vocab import Vocab


class TextCommandHandler:
    """Executes text commands with the vocabulary of the model, in a thread."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    async def execute(self, command: TextCommand) -> TextReply:
        """Return the reply to a command. The input of a client is the only cause of an error."""
        try:
            return await asyncio.to_thread(self._execute, command)
        except JobRejected as exc:
            return TextReply(error=exc.message)
        except ValueError as exc:  # a token that is not in the vocabulary
            return TextReply(error=str(exc))

    def _execute(self, command: TextCommand) -> TextReply:
        vocab, messages = self._vocab, command.messages or ()
        match command.action:
            case TextAction.DETOKENIZE:
                tokens = list(command.tokens or ())
                return TextReply(text=vocab.decode(tokens), pieces=self._pieces(command, tokens))
            case TextAction.APPLY_TEMPLATE:
                return TextReply(text=vocab.render_chat(messages, command.template_options))
            case TextAction.TOKENIZE:
                if command.text is None:
                    tokens = vocab.encode_chat(messages, command.template_options)
                else:
                    tokens = self._encode(command, command.text)
                return TextReply(tokens=tuple(tokens), pieces=self._pieces(command, tokens))

    def _pieces(self, command: TextCommand, tokens: list[int]) -> tuple[tuple[int, ...], ...]:
        if not command.with_pieces:
            return ()
        return tuple(tuple(self._vocab.piece_with_special(token)) for token in tokens)

    def _encode(self, command: TextCommand, text: str) -> list[int]:
        tokens = self._vocab.encode(text)
        if command.add_special:
            return tokens
        added = self._vocab.encode("")
        begins_special = any(span.start == 0 for span in self._vocab.special_tokens.find(text))
        return tokens if begins_special else tokens[len(added) :]
