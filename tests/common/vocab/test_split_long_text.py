"""Long texts are split so that llama.cpp can tokenize each part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.vocabularies import FINDER

from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.common.vocab.split_long_text import MAX_RUN_CHARS, MAX_SPECIALS_PER_PART, split_text
from llamaq.tools.random_gguf import PLAIN, write_model


@given(
    pieces=st.lists(st.sampled_from(["<s>", "<sep>", "[X]", "<", "a", " ", "\n", "é.", "'s", "9"]), max_size=30),
    repeat=st.integers(1, 400),
)
def test_the_parts_of_a_split_text_form_the_text_and_have_no_long_run(pieces: list[str], repeat: int) -> None:
    text = "".join(pieces) * repeat
    spans = FINDER.find(text)
    parts = split_text(text, spans, splits_runs=True)
    assert "".join(parts) == text
    assert all(len(run) <= MAX_RUN_CHARS + max(map(len, FINDER.texts)) for part in parts for run in part.split())
    assert sum(len(FINDER.find(part)) for part in parts) == len(spans)
    assert all(len(FINDER.find(part)) <= MAX_SPECIALS_PER_PART for part in parts)


def test_ordinary_text_is_not_split() -> None:
    text = "An ordinary sentence, with words. " * 500
    assert split_text(text, [], splits_runs=True) == [text]


def test_splits_before_special_tokens_change_no_token(vocab: Vocab) -> None:
    text = "a<|end|> b<|user|>" * (2 * MAX_SPECIALS_PER_PART)
    once = vocab.encode("a<|end|> b<|user|>")[1:]
    assert vocab.encode(text) == [vocab.bos, *once * (2 * MAX_SPECIALS_PER_PART)]


@pytest.mark.starts_processes
def test_a_long_run_of_letters_does_not_overflow_the_stack(tmp_path: Path) -> None:
    """llama.cpp runs this pre-tokenizer with std::regex; 200,000 letters in one call overflow the stack."""
    source = write_model(tmp_path / "regex.gguf", PLAIN).read_bytes()
    pre = b"tokenizer.ggml.pre\x08\x00\x00\x00"
    at = source.index(pre) + len(pre)
    name = b"deepseek-llm"
    changed = source[:at] + len(name).to_bytes(8, "little") + name + source[at + 8 + len(b"qwen2") :]
    (tmp_path / "changed.gguf").write_bytes(changed)
    code = (
        "import sys; from pathlib import Path; from llamaq.common.vocab.llama_vocab import Vocab;"
        "from llamaq.worker.engine.gguf_vocab import extract_vocab;"
        "v = Vocab.from_blob(extract_vocab(Path(sys.argv[1])));"
        "assert v.decode(v.encode('a' * 200_000)) == 'a' * 200_000"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "changed.gguf"], timeout=60, check=True)
