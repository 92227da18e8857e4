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
from llamaq.common.vocab.split_long_text import MAX_PART_CHARS, MAX_RUN_CHARS, MAX_SPECIALS_PER_PART, split_text
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
    assert all(len(part) <= MAX_PART_CHARS + max(map(len, FINDER.texts)) for part in parts)
    assert sum(len(FINDER.find(part)) for part in parts) == len(spans)
    assert all(len(FINDER.find(part)) <= MAX_SPECIALS_PER_PART for part in parts)


@pytest.mark.parametrize("sentence", ["An ordinary sentence, with words.\n\tIt isn't long. ", "हिन्दी भाषा में लिखा है। "])
def test_the_tokens_of_ordinary_text_do_not_change(vocab: Vocab, sentence: str) -> None:
    text = sentence * 1000
    parts = split_text(text, [], splits_runs=True)
    assert len(parts) > 2
    assert [token for part in parts for token in vocab.encode(part)[1:]] == vocab.encode(text)[1:]


def test_splits_before_special_tokens_change_no_token(vocab: Vocab) -> None:
    text = "a<|end|> b<|user|>" * (2 * MAX_SPECIALS_PER_PART)
    once = vocab.encode("a<|end|> b<|user|>")[1:]
    assert vocab.encode(text) == [vocab.bos, *once * (2 * MAX_SPECIALS_PER_PART)]


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("pre_tokenizer", "repeated"),
    [("deepseek-llm", "a"), ("gpt-4o", "\x1c!"), ("gpt-4o", "\n/"), ("tekken", "\n/"), ("exaone-moe", "x y ")],
)
def test_no_text_overflows_the_stack(tmp_path: Path, pre_tokenizer: str, repeated: str) -> None:
    """In one call, llama.cpp overflows the stack with each of these texts, because it uses std::regex."""
    text = repeated * 60_000
    source = write_model(tmp_path / "regex.gguf", PLAIN).read_bytes()
    pre = b"tokenizer.ggml.pre\x08\x00\x00\x00"
    at = source.index(pre) + len(pre)
    name = pre_tokenizer.encode()
    changed = source[:at] + len(name).to_bytes(8, "little") + name + source[at + 8 + len(b"qwen2") :]
    (tmp_path / "changed.gguf").write_bytes(changed)
    (tmp_path / "text").write_text(text, newline="")
    code = (
        "import sys; from pathlib import Path; from llamaq.common.vocab.llama_vocab import Vocab;"
        "from llamaq.worker.engine.gguf_vocab import extract_vocab;"
        "v = Vocab.from_blob(extract_vocab(Path(sys.argv[1]))); text = Path(sys.argv[2]).open(newline='').read();"
        "assert v.decode(v.encode(text)) == text"
    )
    files = (tmp_path / "changed.gguf", tmp_path / "text")
    subprocess.run([sys.executable, "-c", code, *files], timeout=60, check=True)
