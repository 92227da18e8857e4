"""Random-weight models in real llama.cpp, through its low-level API."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader

from llamaq.tools.random_gguf import (
    BOS,
    CHATML,
    EOS,
    GROUPED,
    HYBRID,
    MEMORY_KINDS,
    PLAIN,
    RECURRENT,
    SLIDING,
    TURN_END,
    TURN_START,
    Architecture,
    ModelSpec,
    Weights,
    byte_level_vocabulary,
    write_model,
)

Logits = npt.NDArray[np.float32]

RANDOM_MODELS_SCRIPT = Path(__file__).parents[2] / "bench" / "random_models.py"
LARGE_N_VOCAB = 151_936
N_CTX = 1024
PROMPT = [72, 101, 108, 108, 111, 300, 310, 320, 128, 129, 130, 131, 400, 410, 420, 430] * 2

every_kind = pytest.mark.parametrize("spec", MEMORY_KINDS.values(), ids=MEMORY_KINDS.keys())


class Model:
    """A loaded model with one context of one sequence."""

    def __init__(self, model: llama_cpp.llama_model_p, context: llama_cpp.llama_context_p) -> None:
        vocabulary, memory = llama_cpp.llama_model_get_vocab(model), llama_cpp.llama_get_memory(context)
        assert vocabulary is not None
        assert memory is not None
        self.model, self.context, self.vocabulary, self.memory = model, context, vocabulary, memory
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.expected_vocabulary = byte_level_vocabulary(self.n_vocab)

    def decode(self, tokens: list[int]) -> Logits:
        """Append tokens to the sequence and return the logits after the last token."""
        array = (llama_cpp.llama_token * len(tokens))(*tokens)  # the batch points into the array and does not own it
        assert llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, -1), (self.n_vocab,)).copy()

    def decode_alone(self, tokens: list[int]) -> Logits:
        llama_cpp.llama_memory_clear(self.memory, True)
        return self.decode(tokens)

    def generate(self, prompt: list[int], n_tokens: int) -> Iterator[tuple[int, Logits]]:
        """Yield greedy tokens, each with its logits."""
        logits = self.decode_alone(prompt)
        for _ in range(n_tokens):
            token = int(logits.argmax())
            yield token, logits
            logits = self.decode([token])

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        n_bytes = llama_cpp.llama_token_to_piece(self.vocabulary, token, buffer, len(buffer), 0, False)
        return buffer.raw[:n_bytes]

    def tokenize(self, text: bytes, *, special: bool = False) -> list[int]:
        buffer = (llama_cpp.llama_token * (len(text) + 2))()
        n = llama_cpp.llama_tokenize(self.vocabulary, text, len(text), buffer, len(buffer), special, special)
        return list(buffer[:n])


@contextmanager
def opened(path: Path, *, swa_full: bool = True) -> Iterator[Model]:
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    assert model is not None
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = N_CTX
    params.n_ubatch = 32
    params.n_threads = params.n_threads_batch = 1
    params.swa_full = swa_full
    context = llama_cpp.llama_init_from_model(model, params)
    assert context is not None
    try:
        yield Model(model, context)
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def is_finite_and_varied(logits: Logits) -> bool:
    without_special_tokens = logits[:-4]
    return bool(np.isfinite(logits).all() and 1 < without_special_tokens.std() < 3)


@every_kind
def test_every_kind_gives_finite_and_varied_logits(spec: ModelSpec, path: Path) -> None:
    with opened(write_model(path, spec)) as model:
        assert is_finite_and_varied(model.decode_alone(PROMPT[:1]))
        assert is_finite_and_varied(model.decode_alone(PROMPT))
        assert is_finite_and_varied(model.decode_alone(PROMPT * (N_CTX // len(PROMPT))))


@every_kind
def test_equal_seeds_write_equal_files(spec: ModelSpec, tmp_path: Path) -> None:
    first, again, other = (
        write_model(tmp_path / name, spec, seed=seed).read_bytes() for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    )
    assert first == again
    assert first != other


@every_kind
def test_every_kind_is_smaller_than_a_megabyte(spec: ModelSpec, path: Path) -> None:
    assert write_model(path, spec).stat().st_size < 1_000_000


@every_kind
def test_the_next_token_depends_on_the_first(spec: ModelSpec, path: Path) -> None:
    with opened(write_model(path, spec)) as model:
        logits = model.decode_alone(PROMPT)
        changed = model.decode_alone([PROMPT[0] + 1, *PROMPT[1:]])
        assert np.abs(changed - logits).max() > 0.1 * logits.std()


@every_kind
def test_end_tokens_are_not_generated(spec: ModelSpec, path: Path) -> None:
    with opened(write_model(path, spec)) as model:
        ends = model.expected_vocabulary.end_ids
        assert all(llama_cpp.llama_vocab_is_eog(model.vocabulary, token) for token in ends)
        generated = list(model.generate([model.expected_vocabulary.id_of(BOS)], 200))
        assert all(token < model.n_vocab - 4 for token, _ in generated)
        after_an_ordinary_token = generated[1:]
        assert all(logits.max() - logits[ends].max() > 5 for _, logits in after_an_ordinary_token)


@every_kind
def test_greedy_output_has_many_different_tokens(spec: ModelSpec, path: Path) -> None:
    with opened(write_model(path, spec)) as model:
        assert len({token for token, _ in model.generate(PROMPT, 64)}) > 20


def test_plain_and_grouped_attention_can_remove_the_end_of_a_sequence(path: Path) -> None:
    for spec in (PLAIN, GROUPED):
        with opened(write_model(path, spec)) as model:
            assert not llama_cpp.llama_model_is_recurrent(model.model)
            assert not llama_cpp.llama_model_is_hybrid(model.model)
            assert llama_cpp.llama_model_n_swa(model.model) == 0
            model.decode(PROMPT)
            assert llama_cpp.llama_memory_seq_rm(model.memory, 0, len(PROMPT) // 2, -1)


def test_grouped_attention_shares_and_normalizes_keys(path: Path) -> None:
    names = {tensor.name for tensor in GGUFReader(write_model(path, GROUPED)).tensors}
    assert {"blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight"} < names
    with opened(path) as model:
        n_heads = llama_cpp.llama_model_n_head(model.model)
        assert llama_cpp.llama_model_n_head_kv(model.model) == n_heads // 2


def test_a_sliding_window_drops_the_cells_behind_it(path: Path) -> None:
    write_model(path, SLIDING)
    for swa_full, is_dropped in [(True, False), (False, True)]:
        with opened(path, swa_full=swa_full) as model:
            assert llama_cpp.llama_model_n_swa(model.model) == SLIDING.n_swa
            model.decode(PROMPT * 20)
            assert (llama_cpp.llama_memory_seq_pos_min(model.memory, 0) > 0) is is_dropped


@pytest.mark.parametrize("spec", [RECURRENT, HYBRID], ids=["recurrent", "hybrid"])
def test_a_recurrent_state_cannot_remove_the_end_of_a_sequence(spec: ModelSpec, path: Path) -> None:
    with opened(write_model(path, spec)) as model:
        assert llama_cpp.llama_model_is_recurrent(model.model) is (spec is RECURRENT)
        assert llama_cpp.llama_model_is_hybrid(model.model) is (spec is HYBRID)
        model.decode(PROMPT)
        assert not llama_cpp.llama_memory_seq_rm(model.memory, 0, len(PROMPT) // 2, -1)


@pytest.mark.parametrize("weights", Weights)
def test_every_weight_format_loads(weights: Weights, path: Path) -> None:
    with opened(write_model(path, replace(GROUPED, weights=weights))) as model:
        assert is_finite_and_varied(model.decode(PROMPT))
        buffer = ctypes.create_string_buffer(64)
        llama_cpp.llama_model_desc(model.model, buffer, len(buffer))
        assert weights.value in buffer.value.decode()


@pytest.fixture(scope="module", params=[PLAIN.n_vocab, LARGE_N_VOCAB], ids=["small", "large"])
def vocabulary_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model with a small or a large vocabulary."""
    path = tmp_path_factory.mktemp("vocabulary") / "model.gguf"
    with opened(write_model(path, replace(PLAIN, n_vocab=request.param, chat_template=CHATML))) as model:
        yield model


def test_every_token_decodes_to_its_bytes(vocabulary_model: Model) -> None:
    pieces = [vocabulary_model.piece(token) for token in range(vocabulary_model.n_vocab - 4)]
    assert pieces[:256] == [bytes([byte]) for byte in range(256)]
    assert len(set(pieces)) == len(pieces)
    assert all(1 <= len(piece) <= 8 for piece in pieces)
    assert any("\N{REPLACEMENT CHARACTER}" in piece.decode(errors="replace") for piece in pieces[256:])


def test_nearly_every_piece_is_one_token(vocabulary_model: Model) -> None:
    pieces = {
        token: vocabulary_model.piece(token)
        for token in range(0, vocabulary_model.n_vocab - 4, max(1, vocabulary_model.n_vocab // 5000))
    }
    reached = [vocabulary_model.tokenize(piece) == [token] for token, piece in pieces.items() if piece.isascii()]
    assert np.mean(reached) > 0.99


def test_any_text_is_restored_after_tokenization(vocabulary_model: Model) -> None:
    text = "The fox said:\n\t«Ünïcödé» — 你好, 12345 🎉👩‍🚀 \x00\x7f ".encode()
    assert b"".join(map(vocabulary_model.piece, vocabulary_model.tokenize(text))) == text


def test_special_tokens_and_chat_template_are_those_of_the_file(vocabulary_model: Model) -> None:
    bos, eos, start, end = (
        vocabulary_model.expected_vocabulary.id_of(token) for token in (BOS, EOS, TURN_START, TURN_END)
    )
    assert llama_cpp.llama_vocab_bos(vocabulary_model.vocabulary) == bos
    assert llama_cpp.llama_vocab_eos(vocabulary_model.vocabulary) == eos
    assert llama_cpp.llama_vocab_eot(vocabulary_model.vocabulary) == end
    assert vocabulary_model.tokenize(f"{TURN_START}x{TURN_END}".encode(), special=True) == [bos, start, ord("x"), end]
    assert vocabulary_model.piece(end) == b""
    assert llama_cpp.llama_model_chat_template(vocabulary_model.model, None) == CHATML.encode()


def test_the_file_has_the_given_context_and_no_template_by_default(path: Path) -> None:
    with opened(write_model(path, replace(PLAIN, n_ctx=12_345))) as model:
        assert llama_cpp.llama_model_chat_template(model.model, None) is None
        assert llama_cpp.llama_model_n_ctx_train(model.model) == 12_345


def test_sizes_that_do_not_fit_together_raise() -> None:
    for wrong in ({"n_embd": 48}, {"n_heads": 3}, {"n_swa": 64}, {"architecture": Architecture.GEMMA3}):
        with pytest.raises(ValueError, match="must be"):
            replace(PLAIN, **wrong)
    with pytest.raises(ValueError, match="needs n_heads times head_dim"):
        replace(HYBRID, head_dim=64)


@pytest.mark.parametrize("n_vocab", [260, 1_000_000])
def test_an_impossible_vocabulary_size_raises_and_leaves_no_file(n_vocab: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"n_vocab is {n_vocab}"):
        write_model(tmp_path / "model.gguf", replace(PLAIN, n_vocab=n_vocab))
    assert not list(tmp_path.iterdir())


def test_a_benchmark_model_is_written_once(tmp_path: Path) -> None:
    command = [sys.executable, str(RANDOM_MODELS_SCRIPT), "tiny", "--out", str(tmp_path)]
    lines = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    written, found = (json.loads(line.splitlines()[-1]) for line in lines)
    [model] = tmp_path.iterdir()
    assert written["name"] == "tiny"
    assert written["bytes"] == found["bytes"] == model.stat().st_size
    assert found["seconds"] < written["seconds"]


@pytest.mark.parametrize("weights", Weights)
def test_a_model_that_counts_writes_the_next_token(weights: Weights, path: Path) -> None:
    spec = replace(GROUPED, counts=True, weights=weights)
    with opened(write_model(path, spec)) as model:
        for first in (97, 300, 420):
            tokens = [token for token, _ in model.generate([*PROMPT, first], 60)]
            assert tokens == list(range(first + 1, first + 61))
