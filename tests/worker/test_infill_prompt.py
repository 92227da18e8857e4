"""The prompt of a text with a gap, in the order of llama-server's `/infill`."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import pytest

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.text_commands import Infill, Snippet
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.tools.random_gguf import PLAIN, write_model
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.infill_prompt import encode_infill
from llamaq.worker.metadata_override import MetadataOverride

GAP_TAGS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
FILE_TAGS = ("<|repo_name|>", "<|file_sep|>")
CONTEXT = 4096


class GapModel(Protocol):
    def __call__(self, *tags: str, bos: bool = False) -> Vocab:
        """Return the vocabulary of a model with these control tokens."""


@pytest.fixture(scope="module")
def gap_model(tmp_path_factory: pytest.TempPathFactory) -> GapModel:
    def load(*tags: str, bos: bool = False) -> Vocab:
        model = write_model(tmp_path_factory.mktemp("gap") / "model.gguf", replace(PLAIN, control_tags=tags))
        adds_bos = MetadataOverride.parse(f"tokenizer.ggml.add_bos_token=bool:{str(bos).lower()}")
        return Vocab.from_blob(extract_vocab(model, override_kv=[adds_bos]))

    return load


@pytest.fixture(scope="module")
def vocab(gap_model: GapModel) -> Vocab:
    """The vocabulary of a model that fills gaps and knows files, as Qwen2.5-Coder does."""
    return gap_model(*GAP_TAGS, *FILE_TAGS)


def text_of(vocab: Vocab, tokens: list[int]) -> str:
    return b"".join(map(vocab.piece_with_special, tokens)).decode()


def test_the_parts_stand_in_the_order_of_llama_server(vocab: Vocab) -> None:
    snippets = (Snippet(text="one\n", filename="a.py"), Snippet(text="two"))
    infill = Infill(prefix="def f(", suffix="):\n  pass", begun="a, ", snippets=snippets)
    assert text_of(vocab, encode_infill(vocab, infill, CONTEXT)) == (
        "<|repo_name|>myproject\n"
        "<|file_sep|>a.py\none\n"
        "<|file_sep|>tmp\ntwo"
        "<|file_sep|>filename\n"
        "<|fim_prefix|>def f(a, <|fim_suffix|>):\n  pass<|fim_middle|>"
    )


def test_a_model_without_tokens_for_files_gets_headings(gap_model: GapModel) -> None:
    vocab = gap_model(*GAP_TAGS)
    infill = Infill(prefix="x", suffix="y", snippets=(Snippet(text="one", filename="a.py"),))
    text = text_of(vocab, encode_infill(vocab, infill, CONTEXT))
    assert text == "\n\n--- snippet ---\n\none<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"


def test_a_model_that_asks_for_it_gets_bos_at_the_start(gap_model: GapModel) -> None:
    vocab = gap_model(*GAP_TAGS, *FILE_TAGS, bos=True)
    tokens = encode_infill(vocab, Infill(prefix="x"), CONTEXT)
    assert tokens[0] == vocab.bos
    assert tokens.count(tokens[0]) == 1
    assert text_of(vocab, tokens[1:]).startswith("<|repo_name|>")


def test_the_texts_of_special_tokens_stay_text(vocab: Vocab) -> None:
    tag = GAP_TAGS[2]
    infill = Infill(prefix=tag, suffix=tag, begun=tag, snippets=(Snippet(text=tag, filename=tag),))
    tokens = encode_infill(vocab, infill, CONTEXT)
    assert vocab.infill_tokens is not None
    assert tokens.count(vocab.infill_tokens.middle) == 1
    assert text_of(vocab, tokens).count(tag) == 6


@pytest.mark.parametrize(("context", "n_before", "n_after"), [(8192, 1536, 510 - 2), (1000, 375, 123 - 2)])
def test_the_text_next_to_the_gap_is_kept(vocab: Vocab, context: int, n_before: int, n_after: int) -> None:
    before, after = [vocab.encode_part("".join(f"{number}{name} " for number in range(3000))) for name in "ab"]
    infill = Infill(prefix=vocab.decode(before), suffix=vocab.decode(after), begun="go")
    tokens = encode_infill(vocab, infill, context)
    special, begun = vocab.infill_tokens, vocab.encode_part("go")
    assert special is not None
    start = tokens.index(special.prefix) + 1
    middle = tokens.index(special.suffix)
    n_after += 2 - len(begun)
    assert tokens[start:middle] == [*before[-n_before:], *begun]
    assert tokens[middle + 1 :] == [*after[:n_after], special.middle]


def test_snippets_get_the_room_that_the_text_and_the_answer_leave(vocab: Vocab) -> None:
    snippets = tuple(Snippet(text=f"{number} " * 100, filename=f"{number}.py") for number in range(100))
    infill = Infill(prefix="x", suffix="y", snippets=snippets, max_tokens=100)
    tokens, whole = (encode_infill(vocab, infill, context) for context in (CONTEXT, 10**6))
    assert tokens == whole[-len(tokens) :]
    for max_tokens, n_tokens in ((100, CONTEXT - 100), (None, CONTEXT - 512), (CONTEXT - 6, 6), (CONTEXT, 5)):
        limited = infill.model_copy(update={"max_tokens": max_tokens})
        assert len(encode_infill(vocab, limited, CONTEXT)) == n_tokens


@pytest.mark.parametrize("tags", [(), GAP_TAGS[:2], FILE_TAGS])
def test_a_model_that_fills_no_gaps_is_refused(gap_model: GapModel, tags: tuple[str, ...]) -> None:
    with pytest.raises(JobRejected, match="does not fill gaps"):
        encode_infill(gap_model(*tags), Infill(prefix="x"), CONTEXT)
