"""Special texts are found, a template gets placeholders for them, and it sees some tags of reasoning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.vocabularies import FINDER, chat, special_texts_of, template_vocab

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.chat import Message
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.common.vocab.special_token_masking import Span, SpecialTokenFinder
from llamaq.tools.random_gguf import PLAIN, write_model
from llamaq.worker.engine.gguf_vocab import extract_vocab


def test_special_texts_are_found_from_left_to_right_and_the_longest_first() -> None:
    assert FINDER.find("a<s><sep>[X<s>") == [Span(1, 4), Span(4, 9), Span(11, 14)]
    assert SpecialTokenFinder([]).find("<s>") == []


@pytest.mark.parametrize("text", ["<", "<|", "<|x"])
def test_a_beginning_of_many_special_texts_is_compared_once(text: str) -> None:
    finder = SpecialTokenFinder(f"<|{'x' * (n % 30)}{n}|>" for n in range(300))
    assert finder.find(text * 200_000) == []
    # The characters that the pattern compares. One special text after the other would have 300 "<" and 4350 "x".
    assert (finder._pattern.pattern.count("<"), finder._pattern.pattern.count("x")) == (1, 29)


@given(st.lists(st.text("ab<|.\n", max_size=4), max_size=7), st.text("ab<|.\n", max_size=30))
def test_special_texts_are_those_that_a_search_from_each_character_finds(specials: list[str], text: str) -> None:
    expected: list[Span] = []
    for start in range(len(text)):
        ends = [start + len(special) for special in specials if special and text.startswith(special, start)]
        if ends and start >= (expected[-1].end if expected else 0):
            expected.append(Span(start, max(ends)))
    assert SpecialTokenFinder(specials).find(text) == expected


def test_parts_of_special_texts_are_found_at_both_ends_of_a_text() -> None:
    assert FINDER.find_at_edges(" ep> and <se") == [Span(1, 4), Span(9, 12)]
    assert FINDER.find_at_edges("X") == [Span(0, 1)]
    assert FINDER.find_at_edges("nothing here") == []
    assert FINDER.find_at_edges("  ") == []


THINK_TAGS = ("<think>", "</think>")
STRIPS_REASONING = """{% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}
{%- set c = c.split('</think>')[-1].lstrip() %}{% endif %}[{{ m.role }}]{{ c }}<|im_end|>{% endfor %}"""
JOINS_AROUND_TAGS = "{{ messages[0].content | replace('<think>', '') }}"
PRINTS_ALL = "{{ messages[0].content }}"


def rendered_prompt(tmp_path: Path, template: str, *messages: Message) -> tuple[str, list[str]]:
    """Return the text of the prompt with its special tokens, and the texts of these tokens."""
    spec = replace(PLAIN, chat_template=template, control_tags=THINK_TAGS)
    vocab = Vocab.from_blob(extract_vocab(write_model(tmp_path / "think.gguf", spec)))
    tokens = vocab.encode_chat(messages)[1:]
    return b"".join(map(vocab.piece_with_special, tokens)).decode(), special_texts_of(vocab, tokens)


@pytest.mark.parametrize("reasoning", ["<think>plan</think>", "<think>\nplan <|im_end|>\n</think>\n\n", "</think>"])
def test_a_template_removes_earlier_reasoning_also_if_its_tags_are_special_tokens(
    tmp_path: Path, reasoning: str
) -> None:
    message = Message(role="assistant", content=f"{reasoning}Hello<|im_end|>")
    prompt = rendered_prompt(tmp_path, STRIPS_REASONING, message)
    assert prompt == ("[assistant]Hello<|im_end|><|im_end|>", ["<|im_end|>"])


def test_tags_that_the_template_writes_around_earlier_reasoning_are_special_tokens(tmp_path: Path) -> None:
    template = "{% set parts = messages[0].content.split('</think>') %}<think>{{ parts[0] }}</think> {{ parts[1] }}"
    prompt = rendered_prompt(tmp_path, template, Message(role="assistant", content="why</think>Hi"))
    assert prompt == ("<think>why</think> Hi", ["<think>", "</think>"])


def test_many_tags_of_reasoning_take_no_long_time(tmp_path: Path) -> None:
    message = Message(role="assistant", content="<think>e" * 20_000)
    text, specials = rendered_prompt(tmp_path, JOINS_AROUND_TAGS, message)
    assert (text, specials) == ("e" * 20_000, [])


def test_tags_of_reasoning_in_the_text_of_a_user_stay_text(tmp_path: Path) -> None:
    answer = Message(role="assistant", content="<think>plan</think>Hello")
    user = Message(role="user", content="<think>x</think>y")
    text, specials = rendered_prompt(tmp_path, STRIPS_REASONING, answer, user)
    assert text == "[assistant]Hello<|im_end|>[user]<think>x</think>y<|im_end|>"
    assert specials == ["<|im_end|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (PRINTS_ALL, "<think>a</think>b", "<think>a</think>b"),
        (PRINTS_ALL, "<think>", "<think>"),
        (JOINS_AROUND_TAGS, "<|im_<think>end|>", "<|im_end|>"),
        (JOINS_AROUND_TAGS, "a<|<think>im_end<think>|>b", "a<|im_end|>b"),
        (JOINS_AROUND_TAGS, "<thi<think>nk>", "<think>"),
    ],
)
def test_tags_of_reasoning_in_an_answer_become_no_special_token(
    tmp_path: Path, template: str, content: str, text: str
) -> None:
    assert rendered_prompt(tmp_path, template, Message(role="assistant", content=content)) == (text, [])


def test_tags_of_reasoning_inside_the_reasoning_become_no_special_token(tmp_path: Path) -> None:
    template = "{% set m = messages[0] %}<think>{{ m.reasoning_content }}</think>{{ m.content }}"
    message = Message(role="assistant", content="a<think>b", reasoning_content="Close it with </think> or <|im_end|>")
    text, specials = rendered_prompt(tmp_path, template, message)
    assert text == "<think>Close it with </think> or <|im_end|></think>a<think>b"
    assert specials == ["<think>", "</think>"]


@pytest.mark.parametrize("change", ["upper", "lower", "title"])
def test_a_template_may_change_the_case_of_a_content_with_special_texts(tmp_path: Path, change: str) -> None:
    message = Message(role="user", content="say <|im_end|> now")
    text, specials = rendered_prompt(tmp_path, f"{{{{ messages[0].content | {change} }}}}", message)
    assert (text.lower(), specials) == ("say <|im_end|> now", [])
    assert "<|im_end|>" in text


def test_a_template_that_cuts_a_special_text_in_a_content_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobRejected, match="chat template cuts") as refused:
        rendered_prompt(tmp_path, "{{ messages[0].content[:20] }}", *chat("say <|im_end|> now"))
    assert refused.value.code == ErrorCode.CHAT_TEMPLATE


@pytest.mark.parametrize("depth", [300, 900])
def test_arguments_that_are_nested_too_deeply_are_refused(chat_vocab: Vocab, depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(JobRejected, match="nested too deeply"):
        chat_vocab.encode_chat([Message.model_validate({"role": "assistant", "tool_calls": [call]})])


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ messages[0].content }}|>", "x<|im_end"),
        ("<|im_{{ messages[0].content | trim }}", "  end|> x "),
        ("<|{{ messages[0].content }}|>", "im_end"),
        ("{{ messages[0].content }}{{ messages[1].content }}", "<|im_"),
    ],
)
def test_a_content_and_the_text_next_to_it_never_form_a_special_token_together(
    tmp_path: Path, template: str, content: str
) -> None:
    vocab = template_vocab(tmp_path, template)
    tokens = vocab.encode_chat(chat(content, "end|>"))
    assert special_texts_of(vocab, tokens) == ["<|bos|>"]
    assert "im_" in vocab.decode(tokens)
