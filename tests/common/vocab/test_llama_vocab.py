"""Loading and freeing a vocabulary, its use by several threads, and its chat template."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_cpp
import pytest
from tests.support.vocabularies import chat, template_vocab

from llamaq.common.errors import ErrorCode, JobRejected, ModelError
from llamaq.common.protocol.chat import Message
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.engine.gguf_vocab import extract_vocab


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "does not compile"),
        ("{{ messages[5].content.strip() }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
    ],
)
def test_a_missing_or_failing_template_rejects_the_job(tmp_path: Path, template: str | None, reason: str) -> None:
    vocab = template_vocab(tmp_path, template)
    with pytest.raises(JobRejected, match=reason) as refused:
        vocab.encode_chat(chat("hi"))
    assert refused.value.code == ErrorCode.CHAT_TEMPLATE


def test_all_threads_get_the_same_tokens(vocab: Vocab) -> None:
    text = "The quick brown fox. " * 50
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: vocab.encode(text), range(32)))
    assert all(result == results[0] for result in results)


def test_a_vocabulary_frees_the_model_that_it_loaded_once(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = []
    free = llama_cpp.llama_model_free
    monkeypatch.setattr(llama_cpp, "llama_model_free", lambda model: freed.append(free(model)))
    vocab = Vocab.from_blob(extract_vocab(chat_model))
    vocab.encode_chat(chat("hi <|im_end|>"))
    assert not freed
    del vocab
    assert len(freed) == 1


@pytest.mark.parametrize("blob", [b"", b"GGUF", b"no vocabulary at all" * 10])
def test_bytes_that_are_not_a_vocabulary_are_refused(blob: bytes) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        Vocab.from_blob(blob)


def test_loading_a_vocabulary_writes_nothing_to_stderr(chat_model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from llamaq.common.vocab.llama_vocab import Vocab;"
        "from llamaq.worker.engine.gguf_vocab import extract_vocab;"
        "v = Vocab.from_blob(extract_vocab(Path(sys.argv[1]))); v.encode('<|bos|>x'); del v"
    )
    done = subprocess.run([sys.executable, "-c", code, chat_model], capture_output=True, timeout=60, check=True)
    assert done.stderr == b""


def test_a_template_sees_the_name_of_a_message_and_no_name_without_one(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.name if m.name is defined else '-' }}:{{ m.content }};{% endfor %}"
    vocab = template_vocab(tmp_path, template)
    messages = [Message(role="user", content="hi", name="mia_1"), Message(role="user", content="ho")]
    assert vocab.render_chat(messages) == "mia_1:hi;-:ho;"
