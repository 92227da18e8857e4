from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamaq.common.errors import ModelError
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.engine import gguf_vocab
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ModelOptions
from llamaq.worker.metadata_override import MetadataOverride

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
TEXTS = ("", "Hello, world!", "<|im_start|>user\n", "äöü 你好 😀", "  two  spaces\n\n", "x" * 500)


def test_the_extracted_vocabulary_equals_that_of_the_model(any_model: Path) -> None:
    model = Model(any_model, ModelOptions(n_gpu_layers=0))
    own, other = Vocab.of_model(model.pointer), Vocab.from_blob(extract_vocab(any_model))
    assert other.n_tokens == own.n_tokens
    assert (other.bos, other.eos, other.end_tokens) == (own.bos, own.eos, own.end_tokens)
    for text in TEXTS:
        assert other.encode(text) == own.encode(text)
        assert other.decode(own.encode(text)) == own.decode(own.encode(text))
    assert all(other.piece(token) == own.piece(token) for token in range(own.n_tokens))
    model.close()


def test_the_extracted_file_is_small_and_has_no_tensors(demo_model: Path) -> None:
    blob = extract_vocab(demo_model)
    assert len(blob) < demo_model.stat().st_size / 10
    assert struct.unpack_from("<4sIQ", blob) == (b"GGUF", 3, 0)


def test_the_extracted_bytes_depend_on_the_model_alone(demo_model: Path, chat_model: Path) -> None:
    assert extract_vocab(demo_model) == extract_vocab(demo_model)
    assert extract_vocab(demo_model) != extract_vocab(chat_model)


@pytest.mark.parametrize("key", [b"split.count", b"split.no"])
def test_a_split_model_whose_numbers_have_another_type_is_no_split_model(tmp_path: Path, key: bytes) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key + struct.pack("<IB", 0, 2))
    assert len(extract_vocab(path)) == path.stat().st_size
    assert not gguf_vocab.has_classifier(path)


def test_an_impossible_number_of_tensors_is_no_defect(demo_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "many.gguf"
    data = bytearray(demo_model.read_bytes())
    struct.pack_into("<Q", data, 8, 2**63)
    path.write_bytes(data)
    assert not gguf_vocab.has_classifier(path)


def split_model(tmp_path: Path, index: int) -> Path:
    path = tmp_path / f"split-{index}.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint16("split.no", index)
    writer.add_uint16("split.count", 3)
    writer.add_tokenizer_model("no_vocab")
    for key in ("context_length", "embedding_length", "block_count"):
        writer.add_uint32(f"llama.{key}", 32)
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_vocabulary_of_a_split_model_needs_only_its_first_file(tmp_path: Path) -> None:
    blob = extract_vocab(split_model(tmp_path, 0))
    count_at = blob.index(b"split.count") + len(b"split.count") + 4
    assert blob[count_at : count_at + 2] == b"\0\0"


def test_another_file_of_a_split_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not the first file"):
        extract_vocab(split_model(tmp_path, 2))


def test_files_that_are_not_gguf_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        extract_vocab(tmp_path / "missing.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match="cannot read"):
        extract_vocab(tmp_path / "empty.gguf")
    (tmp_path / "text.gguf").write_text("What is this? " * 10)
    with pytest.raises(ModelError, match="not a GGUF"):
        extract_vocab(tmp_path / "text.gguf")


def test_a_vocabulary_above_the_size_limit_is_refused(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_vocab, "MAX_BLOB_BYTES", 5000)
    with pytest.raises(ModelError, match="5000 bytes"):
        extract_vocab(chat_model)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(4, 11_000), junk=st.binary(min_size=1, max_size=16), end=st.none() | st.integers(0, 11_000))
def test_damaged_metadata_are_accepted_or_raise_a_model_error(
    chat_model: Path, tmp_path: Path, at: int, junk: bytes, end: int | None
) -> None:
    data = bytearray(chat_model.read_bytes()[:12_000])
    data[at : at + len(junk)] = junk
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data[:end])
    with suppress(ModelError):
        assert len(extract_vocab(path)) <= len(data)


def overrides(*texts: str) -> tuple[MetadataOverride, ...]:
    return tuple(map(MetadataOverride.parse, texts))


def test_overridden_metadata_act_on_the_model_and_on_the_extracted_vocabulary(demo_model: Path) -> None:
    changes = overrides("tokenizer.ggml.add_bos_token=bool:false", "tokenizer.ggml.eos_token_id=int:7")
    plain = Vocab.from_blob(extract_vocab(demo_model))
    model = Model(demo_model, ModelOptions(n_gpu_layers=0, override_kv=changes))
    for vocab in (Vocab.of_model(model.pointer), Vocab.from_blob(extract_vocab(demo_model, None, changes))):
        assert plain.encode("Hello") == [plain.bos, *vocab.encode("Hello")]
        assert vocab.eos == 7 != plain.eos
    model.close()


def test_texts_and_new_keys_can_be_overridden(demo_model: Path, tmp_path: Path) -> None:
    changes = overrides(
        "general.name=str:renamed: a, b", "new.number=int:5", "new.real=float:0.5", "new.flag=bool:true"
    )
    (tmp_path / "vocab.gguf").write_bytes(extract_vocab(demo_model, TEMPLATE, changes))
    fields = GGUFReader(tmp_path / "vocab.gguf").fields
    found = [fields[key].contents() for key in ("general.name", "new.number", "new.real", "new.flag")]
    assert found == ["renamed: a, b", 5, 0.5, True]
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE
    before = GGUFReader(demo_model).fields
    unchanged = before.keys() - {"general.name", "tokenizer.chat_template", "GGUF.tensor_count", "GGUF.kv_count"}
    assert all(before[key].contents() == fields[key].contents() for key in unchanged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tokenizer.ggml.add_bos_token=int:1", r"write tokenizer.ggml.add_bos_token=bool:VALUE"),
        ("tokenizer.ggml.eos_token_id=str:7", r"write tokenizer.ggml.eos_token_id=int:VALUE"),
        ("tokenizer.ggml.eos_token_id=int:-1", "the number does not fit"),
        ("tokenizer.ggml.tokens=str:a", "arrays cannot be replaced"),
    ],
)
def test_an_override_of_another_type_is_refused(demo_model: Path, change: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"--override-kv: {change}.*{message}"):
        extract_vocab(demo_model, None, overrides(change))
