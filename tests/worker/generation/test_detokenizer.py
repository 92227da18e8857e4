from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from llamaq.worker.generation.detokenizer import StopMatcher, StreamDetokenizer, TagDetokenizer


def stream(parts: list[bytes], stop: list[str], **options: Any) -> tuple[list[str], bool]:
    """Return the text released after each token and at the end, and whether a stop string was found."""
    detokenizer = StreamDetokenizer(parts.__getitem__, stop, **options)
    released = [detokenizer.feed(token) for token in range(len(parts))]
    return [*released, detokenizer.finish()], detokenizer.stop_string is not None


def expected(text: str, stop: list[str]) -> tuple[str, bool]:
    """Return the text before the first stop string (of several, the longest), and whether the text has one."""
    for end in range(1, len(text) + 1):
        complete = [len(each) for each in stop if text[:end].endswith(each)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


alphabet = st.sampled_from(["a", "b", "ab", "é", "€", "😀", "\ufffd"])
texts = st.lists(alphabet, max_size=25).map("".join)
stops = st.lists(st.lists(alphabet, min_size=1, max_size=5).map("".join), max_size=16)


@given(text=texts, stop=stops, cuts=st.lists(st.integers(0, 60)), n_missing=st.integers(0, 2))
@example(text="aab", stop=["aab", "b"], cuts=[1, 2], n_missing=0)
@example(text="abab", stop=["abb", "ba"], cuts=[], n_missing=0)
def test_the_released_text_ends_before_the_first_complete_stop_string(
    text: str, stop: list[str], cuts: list[int], n_missing: int
) -> None:
    data = text.encode()[: len(text.encode()) - n_missing]
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[start:end] for start, end in pairwise(places)]
    released, stopped = stream(parts, stop)
    assert ("".join(released), stopped) == expected(data.decode(errors="replace"), stop)
    assert not any(each in "".join(released) for each in stop)


@given(text=texts, stop=stops, cuts=st.lists(st.integers(0, 60)))
@example(text="€", stop=["\ufffd"], cuts=[1])
@example(text="a€", stop=["a\ufffd"], cuts=[2])
def test_the_withheld_text_is_what_the_end_would_release(text: str, stop: list[str], cuts: list[int]) -> None:
    data = text.encode()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[start:end] for start, end in pairwise(places)]
    detokenizer = StreamDetokenizer(parts.__getitem__, stop)
    for token in range(len(parts)):
        detokenizer.feed(token)
        assert detokenizer.withheld == stream(parts[: token + 1], stop)[0][-1]


@given(
    data=st.lists(st.sampled_from([b"a", b"\n", b"\xed", b"\xa0", b"\x80", b"\xf0\x9f", b"\xc3"]), max_size=12),
    stop=st.lists(st.sampled_from(["\ufffd", "\ufffd\ufffd", "a\ufffd", "\ufffda"]), max_size=2),
    includes_stop=st.booleans(),
    min_tokens=st.integers(0, 3),
    n_indent=st.integers(0, 1),
)
@example(data=[b"\xed", b"\xa0"], stop=[], includes_stop=False, min_tokens=0, n_indent=0)
@example(data=[b"\xed", b"\xa0"], stop=["\ufffd"], includes_stop=True, min_tokens=0, n_indent=0)
def test_the_withheld_text_of_bytes_that_are_not_utf8_is_what_the_end_would_release(
    data: list[bytes], stop: list[str], includes_stop: bool, min_tokens: int, n_indent: int
) -> None:
    options: Any = {"includes_stop": includes_stop, "min_tokens": min_tokens, "n_indent": n_indent}
    detokenizer = StreamDetokenizer(data.__getitem__, stop, **options)
    for token in range(len(data)):
        detokenizer.feed(token)
        assert detokenizer.withheld == stream(data[: token + 1], stop, **options)[0][-1]


def up_to_dedent(text: str, n_indent: int) -> str:
    """Return a text up to the first line after the first one with fewer than `n_indent` spaces and tabs before it."""
    first, *lines = text.split("\n")
    kept = first
    for number, line in enumerate(lines, 1):
        leading = line[: len(line) - len(line.lstrip(" \t"))]
        kept += "\n"
        goes_on = number < len(lines) or line != leading
        if len(leading) < n_indent and goes_on:
            return kept + leading
        kept += line
    return kept


code = st.lists(st.sampled_from(["a", "b", "\n", "\n", " ", "  ", "\t", "€"]), max_size=25).map("".join)


@given(text=code, cuts=st.lists(st.integers(0, 60)), n_indent=st.integers(1, 4))
@example(text=" a\n  b\n c", cuts=[4], n_indent=2)
@example(text="a\n\n  b", cuts=[], n_indent=1)
def test_the_text_ends_before_a_line_with_too_little_indentation(text: str, cuts: list[int], n_indent: int) -> None:
    data = text.encode()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[start:end] for start, end in pairwise(places)]
    detokenizer = StreamDetokenizer(parts.__getitem__, n_indent=n_indent)
    released = [detokenizer.feed(token) for token in range(len(parts))]
    expected_text = up_to_dedent(text, n_indent)
    assert "".join(released) + detokenizer.finish() == expected_text
    assert detokenizer.has_ended == (expected_text != text)
    assert (detokenizer.may_end, detokenizer.stop_string) == (True, None)


@given(
    text=code, cuts=st.lists(st.integers(0, 60)), n_indent=st.integers(0, 3), stop=st.sampled_from(["\n\n", "a\n", "b"])
)
def test_the_first_of_a_stop_string_and_a_dedent_ends_the_text(
    text: str, cuts: list[int], n_indent: int, stop: str
) -> None:
    data = text.encode()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[start:end] for start, end in pairwise(places)]
    detokenizer = StreamDetokenizer(parts.__getitem__, [stop], n_indent=n_indent)
    released = ""
    for token in range(len(parts)):
        released += detokenizer.feed(token)
        withheld = StreamDetokenizer(parts.__getitem__, [stop], n_indent=n_indent)
        shown = "".join([withheld.feed(earlier) for earlier in range(token + 1)])
        assert detokenizer.withheld == (shown + withheld.finish())[len(shown) :]
    cut = up_to_dedent(text, n_indent) if n_indent else text
    assert released + detokenizer.finish() == expected(cut, [stop])[0]
    assert (detokenizer.stop_string == stop) == expected(cut, [stop])[1]


def test_no_line_ends_the_text_within_the_minimum_of_tokens() -> None:
    parts = [b"a\n", b"b\n", b" c\n", b"d"]
    assert stream(parts, [], n_indent=1, min_tokens=2) == (["a\n", "b\n", " c\n", "", ""], False)
    assert stream(parts, [], n_indent=1, min_tokens=1) == (["a\n", "", "", "", ""], False)


@given(text=texts, stop=stops, cuts=st.lists(st.integers(0, 60)), min_tokens=st.integers(0, 8))
@example(text="abab", stop=["ab", "bab"], cuts=[2], min_tokens=1)
def test_a_stop_string_that_is_complete_within_the_minimum_of_tokens_does_not_end_the_text(
    text: str, stop: list[str], cuts: list[int], min_tokens: int
) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:end] for start, end in pairwise(places)]
    n_before = ([0, *accumulate(map(len, parts))])[min(min_tokens, len(parts))]
    ends = [(end, max(map(len, found))) for end in range(n_before + 1, len(text) + 1)
            if (found := [each for each in stop if text[:end].endswith(each)])]  # fmt: skip
    wanted = text[: ends[0][0] - ends[0][1]] if ends else text
    tokens = [part.encode() for part in parts]
    released, stopped = stream(tokens, stop, min_tokens=min_tokens)
    assert ("".join(released), stopped) == (wanted, bool(ends))
    released, stopped = stream(tokens, stop, min_tokens=min_tokens, includes_stop=True)
    assert ("".join(released), stopped) == (text[: ends[0][0]] if ends else text, bool(ends))


def test_the_text_ends_with_a_stop_string_that_is_included() -> None:
    released, stopped = stream([b"Hi", b" STO", b"P!", b" more"], [" STOP"], includes_stop=True)
    assert released == ["Hi", " STO", "P", "", ""]  # nothing is withheld, because the whole stop string is released
    assert stopped
    detokenizer = StreamDetokenizer([b"a\xc3", b"b"].__getitem__, ["\ufffd"], includes_stop=True)
    assert [detokenizer.feed(0), detokenizer.withheld] == ["a", "\ufffd"]
    assert [detokenizer.feed(1), detokenizer.stop_string] == ["\ufffd", "\ufffd"]


def test_an_incomplete_character_within_the_minimum_of_tokens_completes_no_stop_string() -> None:
    detokenizer = StreamDetokenizer([b"a\xc3"].__getitem__, ["a\ufffd"], min_tokens=1)
    assert [detokenizer.feed(0), detokenizer.withheld, detokenizer.finish()] == ["", "a\ufffd", "a\ufffd"]
    assert detokenizer.stop_string is None


def test_tags_are_found_beside_the_options_of_stop_strings() -> None:
    options: Any = {"min_tokens": 1, "includes_stop": True}
    detokenizer = TagDetokenizer([b"end", b"<t>", b"x end."].__getitem__, ["end"], {1: 3}, **options)
    assert [(detokenizer.feed(token), detokenizer.tag_offset) for token in range(3)] == [
        ("end", None), ("<t>", 3), ("x end", None),
    ]  # fmt: skip
    assert detokenizer.stop_string == "end"


@given(text=texts, stop=stops)
def test_the_released_text_depends_on_the_tokens_alone(text: str, stop: list[str]) -> None:
    data = text.encode()
    single, _ = stream([bytes([byte]) for byte in data], stop)
    for end in range(len(data)):
        together, _ = stream([data[: end + 1]], stop)
        assert together[0] == "".join(single[: end + 1])


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40)))
def test_bytes_that_are_not_utf8_become_replacement_characters(data: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[start:end] for start, end in pairwise(places)]
    released, _ = stream(parts, [])
    assert "".join(released) == data.decode(errors="replace")


def test_a_character_is_released_with_its_last_byte() -> None:
    released, _ = stream([b"\xf0", b"\x9f\x98", b"\x80!"], [])
    assert released == ["", "", "😀!", ""]


def test_no_part_of_a_stop_string_over_several_tokens_is_released() -> None:
    released, stopped = stream([b"Hi", b" STO", b"P", b" more"], [" STOP"])
    assert released == ["Hi", "", "", "", ""]
    assert stopped


def test_the_start_of_a_stop_string_is_released_if_other_text_follows() -> None:
    released, stopped = stream([b"a ST", b"ONE"], [" STOP"])
    assert released == ["a", " STONE", ""]
    assert not stopped


def test_the_start_of_a_stop_string_is_released_at_the_end() -> None:
    released, stopped = stream([b"a ST"], [" STOP"])
    assert released == ["a", " ST"]
    assert not stopped


def test_nothing_follows_a_stop_string_that_ends_inside_a_token() -> None:
    released, stopped = stream([b"one\ntwo", b"three"], ["\n"])
    assert released == ["one", "", ""]
    assert stopped


def test_a_replacement_character_for_an_incomplete_character_may_complete_a_stop_string() -> None:
    released, stopped = stream([b"ab\xc3"], ["b\ufffd"])
    assert released == ["a", ""]
    assert stopped


def test_the_longest_of_several_complete_stop_strings_counts() -> None:
    matcher = StopMatcher(["b", "ab"])
    assert matcher.read("xab!") == (3, "ab")


def test_the_stop_string_that_was_found_is_known() -> None:
    detokenizer = StreamDetokenizer(lambda token: [b"x e", b"nd"][token], ["\n", "end", "d"])
    assert [detokenizer.feed(0), detokenizer.stop_string] == ["x ", None]
    assert [detokenizer.feed(1), detokenizer.stop_string] == ["", "end"]


TAGS = [b"<tag>", b"[TAG]"]
PIECES = [*TAGS, b"<tag>", b"<ta", b"g>", b"[", b"a", "é".encode(), "é".encode()[:1], "😀".encode()[2:], b"\xff"]


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=20),
    stop=st.lists(st.sampled_from(["a", "g>a", "<tag><tag>", "é", "]\ufffd"]), max_size=2),
)
def test_the_offset_of_a_tag_is_its_place_in_the_text(tokens: list[int], stop: list[str]) -> None:
    plain = StreamDetokenizer(PIECES.__getitem__, stop)
    detokenizer = TagDetokenizer(PIECES.__getitem__, stop, {0: len(TAGS[0]), 1: len(TAGS[1])})
    text, n_bytes = "", 0
    for token in tokens:
        released = detokenizer.feed(token)
        assert released == plain.feed(token)
        text += released
        before = b"".join(map(PIECES.__getitem__, tokens))[:n_bytes].decode(errors="replace")
        assert detokenizer.tag_offset == (len(before) if token in (0, 1) else None), "other tokens spell tags"
        n_bytes += len(PIECES[token])
        if detokenizer.stop_string is not None:
            break
    assert detokenizer.finish() == plain.finish()
