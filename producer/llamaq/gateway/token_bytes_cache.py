"""The bytes of tokens. Only workers have the vocabulary, so a worker is asked once for each token."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence

from llamaq.common.protocol.text_commands import TextAction
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.producer import AsyncClient
from llamaq.producer.queries import text_commands

MAX_VOCABULARIES = 16


class TokenBytesCache:
    """For each vocabulary, the bytes of all tokens that workers have returned so far."""

    def __init__(self, queues: QueueDirectory) -> None:
        self._queues = queues
        self._known: dict[str, dict[int, bytes]] = {}

    def __repr__(self) -> str:
        return f"<TokenBytesCache { {name: len(pieces) for name, pieces in self._known.items()} }>"

    async def of(self, client: AsyncClient, tokens: set[int]) -> dict[int, bytes]:
        """Return the bytes of tokens of a queue's model, by token id. The map may contain further tokens.

        While the queue has no worker, the bytes that its last worker has returned are used.

        Raises:
            LlamaqError: No worker of the queue has answered.
        """
        if await self._queues.card(client.queue) is None:
            await self._queues.served(is_fresh=True)  # a worker with another vocabulary may have started
        last = await self._queues.last_card(client.queue)
        known = {} if last is None else self._of_vocabulary(last.vocab_hash)
        if tokens <= known.keys():
            return known
        if await self._queues.card(client.queue) is None:
            known = {}  # a worker that is not listed yet may reply: its vocabulary is not known
        missing = sorted(tokens - known.keys())
        reply = await text_commands.ask(
            client.connection, TextAction.DETOKENIZE, None, tokens=missing, with_pieces=True
        )
        known.update(zip(missing, map(bytes, reply.pieces), strict=True))
        return known

    def _of_vocabulary(self, vocab_hash: str) -> dict[int, bytes]:
        if vocab_hash not in self._known and len(self._known) >= MAX_VOCABULARIES:
            self._known.clear()
        return self._known.setdefault(vocab_hash, {})


class TokenStarts:
    """Finds where the text of each token begins in a text, in characters. The bytes of a character may be divided among
    several tokens.

    Args:
        n_chars: Number of characters before the first token.
    """

    def __init__(self, n_chars: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_chars = n_chars

    def __repr__(self) -> str:
        return f"<TokenStarts {self._n_chars}>"

    def next_start(self, piece: bytes) -> int:
        """Return where the next token begins, which has these bytes."""
        is_pending, text = bool(self._decoder.getstate()[0]), self._decoder.decode(piece)
        is_replaced = is_pending and text.startswith("\ufffd")  # the token does not complete the character before it
        start = self._n_chars + is_replaced
        self._n_chars += len(text)
        return start


def starts_of(tokens: Sequence[int], pieces: Mapping[int, bytes]) -> Iterator[int]:
    """Yield where the text of each token begins in the text of all tokens, in characters."""
    starts = TokenStarts()
    for token in tokens:
        yield starts.next_start(pieces[token])
