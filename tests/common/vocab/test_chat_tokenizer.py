"""The tokens of a chat: special tokens of the template alone, and those of ordinary text for each content."""

from __future__ import annotations

import string
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import given
from hypothesis import strategies as st
from tests.support.vocabularies import chat, special_texts_of, template_vocab

from llamaq.common.protocol.chat import Message, TemplateOptions
from llamaq.common.vocab.llama_vocab import Vocab


def test_a_chat_without_special_texts_has_the_tokens_of_its_rendered_text(vocab: Vocab) -> None:
    messages = [Message(role="system", content="Be kind."), *chat("  What is 2 < 3 | > ?", "<", "user", "")]
    assert vocab.encode_chat(messages) == vocab.encode(vocab.render_chat(messages))


def test_a_chat_has_one_bos_even_if_the_template_writes_it(vocab: Vocab, chat_vocab: Vocab) -> None:
    for either in (vocab, chat_vocab):
        assert either.encode_chat(chat("hi")).count(either.bos or 0) == 1
        assert either.encode_chat(chat("hi <|bos|><|im_start|>")).count(either.bos or 0) == 1


@pytest.mark.parametrize(
    "content",
    ["<|end|>", "a<|end|><|assistant|>b", "<|bos|>", "<|en<|end|>d|>", "<|<|user|>", " <|end|> ", "<|end|><|end|>"],
)
def test_special_texts_in_contents_stay_text(vocab: Vocab, content: str) -> None:
    tokens = vocab.encode_chat(chat(content))
    assert special_texts_of(vocab, tokens) == ["<|bos|>", "<|user|>", "<|end|>", "<|assistant|>"]
    assert vocab.decode(tokens) == content.strip()


FRAGMENTS = ("<|im_start|>", "<|im_end|>", "<|", "|>", "im_", "end", "start", "<", ">", " ", "x")


@given(
    contents=st.lists(
        st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join),
        min_size=1,
        max_size=4,
    )
)
def test_no_content_adds_a_special_token(chat_vocab: Vocab, contents: list[str]) -> None:
    tokens = chat_vocab.encode_chat(chat(*contents))
    assert special_texts_of(chat_vocab, tokens) == [
        "<|bos|>",
        *["<|im_start|>", "<|im_end|>"] * len(contents),
        "<|im_start|>",
    ]
    text = "".join(f"user\n{content}\n" for content in contents) + "assistant\n"
    assert chat_vocab.decode(tokens) == text


@given(contents=st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join), min_size=1, max_size=3))
def test_a_content_has_the_tokens_of_ordinary_text(chat_vocab: Vocab, contents: list[str]) -> None:
    start, end = (chat_vocab.encode_part(tag, parse_special=True) for tag in ("<|im_start|>", "<|im_end|>"))
    expected = [chat_vocab.bos]
    for content in contents:
        expected += [*start, *chat_vocab.encode_part(f"user\n{content}"), *end, *chat_vocab.encode_part("\n")]
    expected += [*start, *chat_vocab.encode_part("assistant\n")]
    assert chat_vocab.encode_chat(chat(*contents)) == expected


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ('{"a": ["<|im_end|>"]}', '{"a": ["<|im_end|>"]}'),
        ('{"a": "\\u003c|im_end|\\u003e"}', '{"a": "<|im_end|>"}'),
        ({"<|im_end|>": 1}, '{"<|im_end|>": 1}'),
        ("<|im_end|>[", '"<|im_end|>["'),
        ({"a": "b"}, '{"a": "b"}'),
        (" ", "{}"),
    ],
)
def test_special_texts_in_the_arguments_of_calls_stay_text(tmp_path: Path, arguments: Any, printed: str) -> None:
    vocab = template_vocab(tmp_path, "{% for call in messages[0].tool_calls %}{{ call.function | tojson }}{% endfor %}")
    message = Message.model_validate(
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}] * 2}
    )
    tokens = vocab.encode_chat([message])
    assert special_texts_of(vocab, tokens) == ["<|bos|>"]
    assert vocab.decode(tokens) == f'{{"name": "f", "arguments": {printed}}}' * 2


def test_special_texts_in_arguments_that_a_template_joins_with_texts_stay_text(tmp_path: Path) -> None:
    """The templates of DeepSeek R1 and V3.1 join the arguments with texts."""
    vocab = template_vocab(
        tmp_path, "{{ '<|im_start|>' + messages[0].tool_calls[0].function.arguments + '<|im_end|>' }}"
    )
    calls = [{"function": {"name": "f", "arguments": {"a": '<|im_end|> "ü"'}}}]
    tokens = vocab.encode_chat([Message.model_validate({"role": "assistant", "tool_calls": calls})])
    start, end = (vocab.encode_part(tag, parse_special=True) for tag in ("<|im_start|>", "<|im_end|>"))
    assert tokens == [vocab.bos, *start, *vocab.encode_part('{"a": "<|im_end|> \\"ü\\""}'), *end]


@pytest.mark.parametrize("reasoning", ["Say <|im_end|> now", "<|im_start|>", "Well <|im_end|><|im_end|>", "no tag <"])
def test_special_texts_in_the_reasoning_of_an_earlier_answer_stay_text(tmp_path: Path, reasoning: str) -> None:
    """Models quote such texts in their reasoning, and clients send it back."""
    vocab = template_vocab(
        tmp_path, "{% for m in messages %}<|im_start|>{{ m.reasoning_content }}<|im_end|>{{ m.content }}{% endfor %}"
    )
    message = Message(role="assistant", content="Hi", reasoning_content=reasoning)
    start, end = (vocab.encode_part(tag, parse_special=True) for tag in ("<|im_start|>", "<|im_end|>"))
    answer = [*start, *vocab.encode_part(reasoning), *end]
    hi = vocab.encode_part("Hi")
    assert vocab.encode_chat([message, message]) == [vocab.bos, *answer, *hi, *answer, *hi]


def test_reasoning_with_a_special_text_is_continued(tmp_path: Path) -> None:
    vocab = template_vocab(tmp_path, "<|im_start|>{{ messages[0].reasoning_content }}<|im_end|>")
    message = Message(role="assistant", content="", reasoning_content="Say <|im_end|>")
    start = vocab.encode_part("<|im_start|>", parse_special=True)
    tokens = vocab.encode_chat([message], TemplateOptions(continue_final_message=True))
    assert tokens == [vocab.bos, *start, *vocab.encode_part("Say <|im_end|>")]


def test_reasoning_and_the_text_next_to_it_never_form_a_special_token_together(tmp_path: Path) -> None:
    vocab = template_vocab(tmp_path, "<|{{ messages[0].reasoning_content }}|>")
    tokens = vocab.encode_chat([Message(role="assistant", content="Hi", reasoning_content="im_end")])
    assert (special_texts_of(vocab, tokens), vocab.decode(tokens)) == (["<|bos|>"], "<|im_end|>")


def spm_vocab(path: Path, template: str, name: str = "spm") -> Vocab:
    """Return a vocabulary of SentencePiece, which puts a space before a text and after each special token."""
    controls = ["<s>", "</s>", "<|user|>", "<|end|>", "<|endoftext|>"]
    normal = ["\u2581", *string.ascii_letters, *"[]/<>|"]
    with closing(GGUFWriter(path, "llama")) as writer:
        writer.add_name(name)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", *controls, *(f"<0x{byte:02X}>" for byte in range(256)), *normal])
        writer.add_token_scores([0.0] * (1 + len(controls) + 256 + len(normal)))
        types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * len(controls), *[TokenType.BYTE] * 256]
        writer.add_token_types([*map(int, types), *[int(TokenType.NORMAL)] * len(normal)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(True)
        writer.add_chat_template(template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
    return Vocab.from_blob(path.read_bytes())


INST = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
INST_WITHOUT_BOS = INST.removeprefix("{{ bos_token }}")
PHI = "{% for m in messages %}<|user|>\n{{ m.content }}<|end|>\n{% endfor %}"


@pytest.mark.parametrize("content", ["ab</s>cd", "ab </s> cd", "the tag <s>", "<s>", "<s></s> x"])
@pytest.mark.parametrize("template", [INST, INST_WITHOUT_BOS])
def test_the_text_of_a_special_token_in_a_content_gets_no_space(tmp_path: Path, template: str, content: str) -> None:
    vocab = spm_vocab(tmp_path / "spm.gguf", template)
    text = f"[INST] {content} [/INST]"
    assert vocab.encode_chat(chat(content)) == [vocab.bos, *vocab.encode_part(text)]
    assert vocab.encode_chat(chat(content, "x")) == [vocab.bos, *vocab.encode_part(text + "[INST] x [/INST]")]


@pytest.mark.parametrize(("name", "text"), [("phi-3", "<s><|user|> ab</s>c<|end|><|user|> x<|end|>"), ("spm", None)])
def test_white_space_after_a_special_token_stays_or_not_as_the_vocabulary_has_it(
    tmp_path: Path, name: str, text: str | None
) -> None:
    vocab = spm_vocab(tmp_path / "spm.gguf", PHI, name)
    tokens = vocab.encode_chat(chat("ab</s>c", "x"))
    printed = b"".join(map(vocab.piece_with_special, tokens)).decode()
    assert printed == (text or "<s><|user|> \nab</s>c<|end|> \n<|user|> \nx<|end|> \n")
    plain = b"".join(map(vocab.piece_with_special, vocab.encode_chat(chat("abXc", "x")))).decode()
    assert printed == plain.replace("X", "</s>")


def test_a_special_token_that_the_template_forms_from_a_role_stays_special(tmp_path: Path) -> None:
    vocab = template_vocab(tmp_path, "<|{{ messages[0].role }}|>{{ messages[0].content }}")
    tokens = vocab.encode_chat([Message(role="im_start", content="<")])
    assert special_texts_of(vocab, tokens) == ["<|bos|>", "<|im_start|>"]
