"""Executes the text commands of clients: tokenize, detokenize, apply the chat template, make a prompt with a gap."""

from __future__ import annotations

import asyncio

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.text_commands import Infill, TextAction, TextCommand, TextReply
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.infill_prompt import encode_infill


class TextCommandHandler:
    """Executes text commands with the vocabulary of the model, in a thread.

    Args:
        vocab: The vocabulary.
        context_limit: Largest number of tokens of a job, prompt included.
        ends_texts: Whether a text ends with the special tokens that the model asks for, as texts for embeddings do.
    """

    def __init__(self, vocab: Vocab, *, context_limit: int, ends_texts: bool = False) -> None:
        self._vocab = vocab
        self._context_limit = context_limit
        self._encode_text = vocab.encode_whole if ends_texts else vocab.encode

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
                text = vocab.render_chat(messages, command.template_options)
                # The tokenizer replaces half surrogate pairs too, so the text of the reply has the same tokens.
                return TextReply(text=text.encode(errors="replace").decode())
            case TextAction.INFILL:
                tokens = encode_infill(self._vocab, command.infill or Infill(), self._context_limit)
                return TextReply(tokens=tuple(tokens), pieces=self._pieces(command, tokens))
            case TextAction.TOKENIZE:
                if command.text is None:
                    tokens = vocab.encode_chat(messages, command.template_options)
                else:
                    tokens = self._encode(command, command.text)
                pieces = self._pieces(command, tokens)
                return TextReply(tokens=tuple(tokens), pieces=pieces, parse_special=command.parse_special)

    def _pieces(self, command: TextCommand, tokens: list[int]) -> tuple[tuple[int, ...], ...]:
        if not command.with_pieces:
            return ()
        return tuple(tuple(self._vocab.piece_with_special(token)) for token in tokens)

    def _encode(self, command: TextCommand, text: str) -> list[int]:
        if command.parse_special:
            return self._encode_text(text) if command.add_special else self._vocab.encode_part(text, parse_special=True)
        frame = self._encode_text("") if command.add_special else []
        n_before = 1 if frame[:1] == [self._vocab.bos] else 0
        return [*frame[:n_before], *self._vocab.encode_part(text, parse_special=False), *frame[n_before:]]
