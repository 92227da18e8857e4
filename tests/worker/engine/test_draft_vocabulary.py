from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llamaq.common.errors import ModelError
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.tools.random_gguf import PLAIN, ModelSpec, write_model
from llamaq.worker.engine.draft_vocabulary import check_draft_vocabulary
from llamaq.worker.engine.gguf_vocab import extract_vocab


def vocab_of(spec: ModelSpec, folder: Path) -> Vocab:
    return Vocab.from_blob(extract_vocab(write_model(folder / "model.gguf", spec)))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    return vocab_of(PLAIN, tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(("n_more", "fits"), [(0, True), (128, True), (129, False)])
def test_unused_tokens_at_the_end_may_differ(
    target: Vocab, n_more: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = vocab_of(PLAIN, tmp_path)
    monkeypatch.setattr(draft, "n_tokens", target.n_tokens + n_more)
    for one, other in ((target, draft), (draft, target)):
        if fits:
            check_draft_vocabulary(one, other)
        else:
            with pytest.raises(ModelError, match=f"--model-draft: .* {other.n_tokens} tokens.*--speculation ngram"):
                check_draft_vocabulary(one, other)


def test_a_token_with_another_text_is_named(target: Vocab, tmp_path: Path) -> None:
    draft = vocab_of(replace(PLAIN, control_tags=("[TOOL_CALLS]",)), tmp_path)
    with pytest.raises(ModelError, match=r"token \d+ is .*\[TOOL_CALLS\]|token \d+ is .*, not "):
        check_draft_vocabulary(target, draft)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("kind", 1, "type"), ("adds_bos", False, "BOS"), ("bos", 7, "BOS"), ("adds_eos", True, "EOS")],
)
def test_another_tokenizer_is_refused(
    target: Vocab, name: str, value: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = vocab_of(PLAIN, tmp_path)
    monkeypatch.setattr(draft, name, value)
    with pytest.raises(ModelError, match=message):
        check_draft_vocabulary(target, draft)
