"""The position of a reader: it takes each token and character once, from pieces that overlap or have gaps."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.producer.streaming.output_position import OutputPosition

TEXT = "".join(f"{number} " for number in range(40))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(-3, 3), st.integers(0, 25)), max_size=60))
@settings(deadline=None)
def test_a_position_returns_every_token_and_character_once_for_any_pieces(
    pieces: list[tuple[int, int, int, int]],
) -> None:
    position = OutputPosition()
    tokens: list[int] = []
    tag_offsets: list[int] = []
    text = ""
    for offset, count, shift, chars in pieces:
        start = max(0, min(len(TEXT), 2 * offset + shift))
        piece = TEXT[start : start + chars]
        tags = tuple(start + place for place, character in enumerate(piece) if character == " ")
        event = TokenSpan(offset, tuple(range(offset, offset + count)), start, piece, tag_offsets=tags)
        if position.is_before(event):
            continue
        new = position.advance(event)
        if new is not None:
            assert (new.offset, new.text_offset) == (len(tokens), len(text))
            tokens += new.tokens
            text += new.text
            tag_offsets += new.tag_offsets
    assert tokens == list(range(len(tokens)))
    assert tag_offsets == [place for place, character in enumerate(text) if character == " "]
    assert text == TEXT[: len(text)]
    assert (position.tokens, position.chars) == (len(tokens), len(text))


def test_the_probabilities_of_a_prompt_come_once_with_the_first_token() -> None:
    prompt = PromptLogprobs((5,), 0, b"")
    first, whole = (TokenSpan(0, tokens, 0, "ab", prompt_logprobs=prompt) for tokens in ((1,), (1, 2)))
    position, late = OutputPosition(), OutputPosition()
    assert position.advance(first) == first
    assert position.advance(first) is None
    assert position.advance(whole) == TokenSpan(1, (2,), 2, "")
    assert late.advance(whole) == whole
