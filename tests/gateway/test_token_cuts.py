"""The text of an answer is cut at its tokens."""

from __future__ import annotations

from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.gateway.responses.token_cuts import TokenCuts

PIECES = {1: b"Hel", 2: b"lo ", 3: "é".encode()[:1], 4: "é".encode()[1:], 5: b"<|end|>", 6: b"wor"}


def logprobs(n: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-0.5, ())] * n


def cut(*chunks: tuple[str, list[int]]) -> list[tuple[str, list[int]]]:
    cuts = TokenCuts()
    found = [each for text, tokens in chunks for each in cuts.feed(text, tokens, logprobs(len(tokens)), PIECES)]
    return [(text, [entry["id"] for entry in entries]) for text, entries in [*found, *cuts.finish()]]


def test_each_token_has_its_text() -> None:
    assert cut(("Hello ", [1, 2])) == [("Hel", [1]), ("lo ", [2])]
    assert cut(("Hel", [1]), ("", [2]), ("lo ", [])) == [("Hel", [1]), ("lo ", [2])]


def test_half_a_character_has_no_text() -> None:
    assert cut(("", [3]), ("é", [4])) == [("", [3]), ("é", [4])]


def test_a_hidden_token_has_no_text() -> None:
    assert cut(("Hel", [1]), ("lo wor", [5, 2, 6])) == [("Hel", [1]), ("", [5]), ("lo ", [2]), ("wor", [6])]


def test_a_stop_string_may_cut_the_last_token() -> None:
    assert cut(("Hel", [1]), ("w", [6])) == [("Hel", [1]), ("w", [6])]
    assert cut(("Hel", [1]), ("", [6])) == [("Hel", [1])]
