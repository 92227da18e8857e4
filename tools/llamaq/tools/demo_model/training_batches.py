"""Packs tokenized documents into the rows of training batches. Each token has its loss weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from llamaq.tools.demo_model.corpus import Mixture, draw_document
from llamaq.tools.demo_model.document import PAD, Document
from llamaq.tools.demo_model.seeded_choice import Split

MISSES_UNTIL_FULL: Final = 20
"""A batch is full when this number of successive documents did not fit into any of its rows."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed documents. Each tensor has the shape (rows, length)."""

    ids: Tensor
    targets: Tensor
    """For each token, the next token of the same document."""
    weights: Tensor
    """Loss weight of each target; zero at the end of a document and in padding."""
    documents: Tensor
    """For each token, the number of its document; -1 for padding."""

    def mask(self) -> Tensor:
        """Return the attention mask (rows, 1, length, length). A token attends only within its document."""
        same = self.documents[:, :, None] == self.documents[:, None, :]
        return same.tril()[:, None]


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[float]]:
    """Return the token ids of a document and the loss weight of each token."""
    ids: list[int] = []
    weights: list[float] = []
    encodings = tokenizer.encode_batch([segment.text for segment in document.segments])
    for segment, encoding in zip(document.segments, encodings, strict=True):
        ids.extend(encoding.ids)
        weights.extend([segment.role.value] * len(encoding.ids))
    return ids, weights


class Packer:
    """Fills the rows of a batch. A document that is longer than a row is cut at the end."""

    def __init__(self, rows: int, length: int, pad: int) -> None:
        self.length = length
        self.used = [0] * rows
        self.number = 0
        self.ids = torch.full((rows, length), pad)
        self.targets = torch.full((rows, length), pad)
        self.weights = torch.zeros((rows, length))
        self.documents = torch.full((rows, length), -1)

    def place(self, tokens: list[int], weights: list[float]) -> bool:
        """Add a document to the first row with enough room. Returns False if no row has room."""
        size = min(len(tokens), self.length)
        row = next((index for index, used in enumerate(self.used) if used + size <= self.length), None)
        if row is None:
            return False
        start, stop = self.used[row], self.used[row] + size
        self.ids[row, start:stop] = torch.tensor(tokens[:size])
        self.targets[row, start : stop - 1] = self.ids[row, start + 1 : stop]
        self.weights[row, start : stop - 1] = torch.tensor(weights[1:size])
        self.documents[row, start:stop] = self.number
        self.used[row] = stop
        self.number += 1
        return True

    def batch(self) -> Batch:
        """Return a batch of the documents that were added so far."""
        return Batch(self.ids, self.targets, self.weights, self.documents)


def pack(documents: Iterator[tuple[list[int], list[float]]], rows: int, length: int, pad: int) -> Batch:
    """Fill `rows` rows of `length` tokens.

    First, documents with enough tokens for the whole batch are drawn and placed, longest first. Then further documents
    are drawn, and placed if they fit, until `MISSES_UNTIL_FULL` successive documents did not fit.
    """
    drawn: list[tuple[list[int], list[float]]] = []
    tokens = 0
    while tokens < rows * length:
        drawn.append(next(documents))
        tokens += min(len(drawn[-1][0]), length)
    packer = Packer(rows, length, pad)
    for document in sorted(drawn, key=lambda pair: -len(pair[0])):
        packer.place(*document)
    misses = 0
    while misses < MISSES_UNTIL_FULL:
        misses = 0 if packer.place(*next(documents)) else misses + 1
    return packer.batch()


def draw_batch(tokenizer: Tokenizer, mixture: Mixture, seed: str, rows: int, length: int) -> Batch:
    """Return the batch of this seed. It is the same on every machine."""

    def stream() -> Iterator[tuple[list[int], list[float]]]:
        index = 0
        while True:
            yield encode(tokenizer, draw_document(Split.TRAIN, f"{seed}:{index}", mixture, length))
            index += 1

    pad = tokenizer.token_to_id(PAD)
    if pad is None:
        raise ValueError(f"the tokenizer has no token {PAD}")
    return pack(stream(), rows, length, pad)
