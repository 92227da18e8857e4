"""The tokens of one llama_decode, as a llama_batch.

The C arrays of the llama_batch are numpy arrays, because assigning to slices of ctypes arrays takes longer than the
calls of llama.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np


class TokenBatch:
    """A llama_batch whose arrays are numpy arrays of this object. Each token belongs to one sequence.

    A token has a row if llama_decode returns its logits, or its embedding.

    Args:
        capacity: Upper bound on the number of tokens.
    """

    def __init__(self, capacity: int) -> None:
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._seq_ids = np.zeros(capacity, np.int32)
        self._has_row = np.zeros(capacity, np.int8)
        self._n_seq_ids = np.ones(capacity, np.int32)
        # llama_batch.seq_id has one pointer for each token. The attribute keeps the array alive; llama_batch does not.
        self._seq_id_pointers = self._seq_ids.ctypes.data + np.arange(capacity, dtype=np.uintp) * 4
        self.struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            embd=None,
            pos=self._positions.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            n_seq_id=self._n_seq_ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._seq_id_pointers.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
            logits=self._has_row.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def __len__(self) -> int:
        return int(self.struct.n_tokens)

    def clear(self) -> None:
        """Remove all tokens."""
        self.struct.n_tokens = 0

    def add_decode_tokens(self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int]) -> None:
        """Append one token for each of several sequences. Every token has a row."""
        start = len(self)
        end = start + len(tokens)
        self._tokens[start:end] = tokens
        self._positions[start:end] = positions
        self._seq_ids[start:end] = seq_ids
        self._has_row[start:end] = 1
        self.struct.n_tokens = end

    def add_chunk(
        self, tokens: Sequence[int], position: int, seq_id: int, *, has_row: bool, n_first_rows: int = 0
    ) -> None:
        """Append consecutive tokens of one sequence, from `position` on.

        Args:
            tokens: The tokens.
            position: Position of the first token in its sequence.
            seq_id: The sequence.
            has_row: Whether the last token has a row.
            n_first_rows: Number of tokens at the start that have a row too.
        """
        start = len(self)
        end = start + len(tokens)
        self._tokens[start:end] = tokens
        self._positions[start:end] = np.arange(position, position + len(tokens), dtype=np.int32)
        self._seq_ids[start:end] = seq_id
        self._has_row[start:end] = 0
        self._has_row[end - 1] = has_row
        self._has_row[start : start + n_first_rows] = 1
        self.struct.n_tokens = end

    def add_draft(self, tokens: Sequence[int], position: int, seq_id: int) -> None:
        """Append consecutive tokens of one sequence, from `position` on. Every token has a row."""
        self.add_chunk(tokens, position, seq_id, has_row=True, n_first_rows=len(tokens))

    def add_text(self, tokens: Sequence[int], seq_id: int) -> None:
        """Append a whole sequence. Every token has a row."""
        self.add_draft(tokens, 0, seq_id)
