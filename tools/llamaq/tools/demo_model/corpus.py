"""The training texts of the model (a mixture of three kinds of text), and the training texts of the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from llamaq.tools.demo_model import word_lists
from llamaq.tools.demo_model.dialogues import dialogue_document
from llamaq.tools.demo_model.document import Document
from llamaq.tools.demo_model.fact_questions import recall_document
from llamaq.tools.demo_model.seeded_choice import Split, generator
from llamaq.tools.demo_model.stories import story_document


@dataclass(frozen=True, slots=True)
class Mixture:
    """Weights of the three kinds of text. They are proportional to the numbers of tokens."""

    recall: float
    stories: float
    dialogues: float


TYPICAL_TOKENS: Final = 180
"""Approximate length of a story or a dialogue. Used to convert shares of tokens into shares of documents."""


def draw_document(split: Split, seed: int | str, mixture: Mixture, length_tokens: int) -> Document:
    """Draw one document.

    Args:
        split: Whether to draw from the combinations for training or from the held-out ones.
        seed: Equal seeds give equal documents.
        mixture: Weights of the three kinds of text.
        length_tokens: Approximate length of a recall document; longer values also make dialogues longer.
    """
    rng = generator(split, "mixture", seed)
    recall_length = rng.choice((length_tokens, length_tokens, max(32, length_tokens // 2)))
    weights = (
        mixture.recall / recall_length,
        mixture.stories / TYPICAL_TOKENS,
        mixture.dialogues / TYPICAL_TOKENS,
    )
    (which,) = rng.choices(("recall", "story", "dialogue"), weights)
    if which == "recall":
        return recall_document(split, seed, recall_length)
    if which == "story":
        return story_document(split, seed)
    return dialogue_document(split, seed, length_tokens)


def tokenizer_texts(documents: int, seed: int) -> Iterator[str]:
    """Yield the word lists many times, so that each word becomes one token, and then a sample of all documents."""
    names = [*word_lists.NAMES, *word_lists.PET_NAMES, "Llamaq"]
    words = [
        *word_lists.COLOURS,
        *word_lists.OBJECTS,
        *word_lists.FOODS,
        *word_lists.PLACES,
        *word_lists.KINDS,
        *word_lists.PETS,
    ]
    for _ in range(50):
        yield " ".join(["", *names, *words])
        yield "\n".join(names)
    for _ in range(3):
        yield " ".join(["", *word_lists.COMMON_WORDS])
    mixture = Mixture(recall=1, stories=3, dialogues=3)
    for index in range(documents):
        yield draw_document(Split.TRAIN, f"tokenizer:{seed}:{index}", mixture, 200).text
