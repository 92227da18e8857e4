"""The vocabulary of the random-weight models: a byte-level BPE that tokenizes any text.

Token ids, in this order: the 256 bytes (the id is the byte), merged pieces, the tags, the four special tokens. The tags
are the further control tokens and user-defined tokens of a model's specification. The pieces are constructed, not
learned: syllables, characters of two to four UTF-8 bytes, English words, invented words, and all words again with a
space before them. The first bytes of a character are tokens too, so that a detokenizer is tested with incomplete
characters. The merges are ranked so that the text of nearly every piece is tokenized to this piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from gguf import TokenType

N_BYTES = 256
BOS, EOS, TURN_START, TURN_END = "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, TURN_START, TURN_END)

SYLLABLES = tuple(consonant + vowel for consonant, vowel in product("bcdfghjklmnpqrstvwxz", "aeiou"))
CHARACTERS = "éèüöñçàßдежиαβ→€你好世界😀🎉"
CHARACTER_RANGES = (
    range(0x0100, 0x0180),  # Latin Extended-A
    range(0x0391, 0x03CA),  # Greek
    range(0x0400, 0x0460),  # Cyrillic
    range(0x3041, 0x3097),  # Hiragana
    range(0x30A1, 0x30FB),  # Katakana
    range(0x4E00, 0x7000),  # Han
    range(0xAC00, 0xB400),  # Hangul
    range(0x1F300, 0x1F650),  # pictographs and emoji
)
WORDS = """
    the and of to in is was that it he she for on with as his her they at be this from have had by not but what all
    were when we there can an your which said if do will about how up out them then some so would into has more him
"""
N_LONG_WORDS = 65_000  # words of three syllables; with and without a space, they suffice for a vocabulary of 160,000
LONG_WORD_STRIDE = 48_271  # has no common factor with 100³, so that no word occurs twice


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and merges in the form of GGUF: each byte is written as one printable character."""

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    tags: tuple[tuple[str, TokenType], ...] = ()
    """Texts and types of the tags, which are among the tokens."""

    @property
    def types(self) -> list[int]:
        n_plain = len(self.tokens) - len(self.tags) - len(SPECIAL_TOKENS)
        tag_types = [int(kind) for _, kind in self.tags]
        return [int(TokenType.NORMAL)] * n_plain + tag_types + [int(TokenType.CONTROL)] * len(SPECIAL_TOKENS)

    def id_of(self, special: str) -> int:
        return len(self.tokens) - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(special)

    @property
    def opening_ids(self) -> list[int]:
        return [self.id_of(BOS), self.id_of(TURN_START)]

    @property
    def end_ids(self) -> list[int]:
        return [self.id_of(EOS), self.id_of(TURN_END)]


@cache
def byte_level_vocabulary(n_tokens: int, tags: tuple[tuple[str, TokenType], ...] = ()) -> Vocabulary:
    """Return a vocabulary of exactly `n_tokens` entries, the same at every call.

    Args:
        n_tokens: Number of tokens.
        tags: Texts and types of further tokens.

    Raises:
        ValueError: `n_tokens` is too small for bytes, special tokens and one merge, or too large for the word lists.
    """
    n_merges = n_tokens - N_BYTES - len(tags) - len(SPECIAL_TOKENS)
    if n_merges < 1:  # llama.cpp refuses a BPE vocabulary without merges
        raise ValueError(f"n_vocab is {n_tokens}; bytes, special tokens and a merge are {n_tokens - n_merges + 1}")
    tokens = dict.fromkeys(_byte_characters())
    merges: list[str] = []
    for left, right in _pairs():
        if len(merges) == n_merges:
            break
        if left + right not in tokens:
            tokens[left + right] = None
            merges.append(f"{left} {right}")
    else:
        raise ValueError(f"n_vocab is {n_tokens}, but at most {len(tokens) + len(SPECIAL_TOKENS)} tokens can be made")
    return Vocabulary((*tokens, *(text for text, _ in tags), *SPECIAL_TOKENS), tuple(merges), tags)


@cache
def _byte_characters() -> tuple[str, ...]:
    """Return the printable character of each byte (`bytes_to_unicode` of OpenAI's GPT-2 encoder)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 2 * 256))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(N_BYTES))


def _spell(text: str) -> str:
    return "".join(_byte_characters()[byte] for byte in text.encode())


def _pairs() -> Iterator[tuple[str, str]]:
    """Yield the pairs to merge in order of rank. Each part of a pair is a byte or the result of an earlier merge."""
    wide_characters = (chr(code_point) for code_points in CHARACTER_RANGES for code_point in code_points)
    for text in (*SYLLABLES, *CHARACTERS):
        yield from _prefix_merges(_spell(text))
    for word in WORDS.split():
        yield from _prefix_merges(re.findall("|".join((*SYLLABLES, ".")), word))
    for character in wide_characters:
        yield from _prefix_merges(_spell(character))
    yield from product(SYLLABLES, repeat=2)
    yield from _long_words()
    space = _spell(" ")
    for word in (*WORDS.split(), *map("".join, product(SYLLABLES, repeat=2)), *map("".join, _long_words())):
        yield space, word


def _long_words() -> Iterator[tuple[str, str]]:
    """Yield words of three syllables, split where BPE splits them: BPE merges the pair of lower rank first."""
    n = len(SYLLABLES)
    for index in range(0, N_LONG_WORDS * LONG_WORD_STRIDE, LONG_WORD_STRIDE):
        first, second, third = index // n**2 % n, index // n % n, index % n
        left, middle, right = SYLLABLES[first], SYLLABLES[second], SYLLABLES[third]
        yield (left + middle, right) if (first, second) <= (second, third) else (left, middle + right)


def _prefix_merges(characters: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the merges that build a text from left to right: for `abc` (a, b) and (ab, c)."""
    grown = ""
    for character in characters:
        if grown:
            yield grown, character
        grown += character
