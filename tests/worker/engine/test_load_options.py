from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from llamaq.common.errors import EngineError, ModelError
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.engine.llama_bindings import SUCCESS, Model
from llamaq.worker.engine.load_options import CACHE_TYPES, ContextOptions, ModelOptions, RopeOptions

OPTIONS = ContextOptions(
    n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=4, n_threads=1, n_threads_batch=1, flash_attn="on"
)
CPU = ModelOptions(n_gpu_layers=0)
PROMPT = [5, 200, 31, 77, 600, 12, 9, 9, 45, 300] * 4


def last_logits(engine: Engine, tokens: Sequence[int], seq_id: int = 0, start: int = 0) -> npt.NDArray[np.float32]:
    """Compute tokens from position `start` on, and return the logits after the last one."""
    engine.context.batch.clear()
    engine.context.batch.add_chunk(tokens, start, seq_id, has_row=True)
    assert engine.context.decode() == SUCCESS
    return np.array(engine.context.logits(1)[0])


@pytest.fixture(scope="module")
def exact(demo_model: Path) -> Iterator[npt.NDArray[np.float32]]:
    """The logits after `PROMPT` with the default options."""
    engine = Engine(Model(demo_model, CPU), OPTIONS)
    yield last_logits(engine, PROMPT)
    engine.close()


@pytest.mark.cpu  # a GPU rounds the queries of a small batch when the cells are quantized
@pytest.mark.parametrize("name", [name for name in CACHE_TYPES if name != "f16"])
def test_kv_cells_of_every_type_are_computed_saved_and_loaded(
    demo_model: Path, exact: npt.NDArray[np.float32], name: str
) -> None:
    engine = Engine(Model(demo_model, CPU), replace(OPTIONS, cache_type_k=name, cache_type_v=name))
    logits = last_logits(engine, PROMPT)
    assert 0 <= np.abs(logits - exact).max() / exact.std() < 1.5, "the same model, rounded"
    saved = engine.sequences.save(0, 0, 32)
    assert engine.sequences.load(1, 0, 32, saved, 0)
    again = last_logits(engine, PROMPT[32:], seq_id=1, start=32)
    assert np.abs(again - logits).max() / logits.std() < 0.02
    engine.close()


def test_a_quantized_cell_is_smaller(demo_model: Path) -> None:
    sizes = {}
    for name in ("f16", "q8_0"):
        engine = Engine(Model(demo_model, CPU), replace(OPTIONS, cache_type_k=name, cache_type_v=name))
        last_logits(engine, PROMPT)
        sizes[name] = engine.context.state_size(0)
        engine.close()
    assert sizes["q8_0"] < 0.6 * sizes["f16"]


def test_quantized_values_without_flash_attention_are_refused(demo_model: Path) -> None:
    model = Model(demo_model, CPU)
    with pytest.raises(EngineError, match="cannot create a context"):
        Engine(model, replace(OPTIONS, flash_attn="off", cache_type_v="q8_0"))
    model.close()


@pytest.mark.parametrize(
    "options",
    [
        replace(CPU, use_mmap=False),
        replace(CPU, use_mmap=True),
        replace(CPU, use_direct_io=True),
        replace(CPU, lazy_mode="on"),
        replace(CPU, lazy_mode="off"),
        replace(CPU, override_tensor=("ffn_.*=CPU", "attn=CPU")),
        pytest.param(replace(CPU, tensor_split=(3, 1), split_mode="row"), marks=pytest.mark.cpu),  # CUDA refuses it
        pytest.param(ModelOptions(split_mode="tensor"), marks=pytest.mark.gpu),
    ],
    ids=["read", "mapped", "direct", "lazy", "not-lazy", "override", "row", "tensor"],
)
def test_how_a_model_is_loaded_does_not_change_what_it_computes(
    demo_model: Path, exact: npt.NDArray[np.float32], options: ModelOptions
) -> None:
    engine = Engine(Model(demo_model, options), OPTIONS)
    assert np.abs(last_logits(engine, PROMPT) - exact).max() / exact.std() < 0.02
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (replace(CPU, override_tensor=("exps=CUDA7",)), "--override-tensor: 'exps=CUDA7' is not .* buffers CPU"),
        (replace(CPU, override_tensor=("exps",)), "--override-tensor"),
        (replace(CPU, tensor_split=(1.0,) * 500), "--tensor-split: 500 shares"),
    ],
)
def test_options_that_do_not_fit_the_machine_are_refused(demo_model: Path, options: ModelOptions, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Model(demo_model, options)


def test_scaled_positions_change_the_logits(demo_model: Path, exact: npt.NDArray[np.float32]) -> None:
    engine = Engine(Model(demo_model, CPU), replace(OPTIONS, rope=RopeOptions(scaling="linear", freq_scale=0.25)))
    assert np.abs(last_logits(engine, PROMPT) - exact).max() / exact.std() > 0.05
    engine.close()


def test_a_warm_up_leaves_no_cells(demo_model: Path, exact: npt.NDArray[np.float32]) -> None:
    engine = Engine(Model(demo_model, CPU), OPTIONS)
    engine.warm_up()
    assert engine.context.last_position(0) == -1
    assert np.abs(last_logits(engine, PROMPT) - exact).max() / exact.std() < 0.02
    engine.close()


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def test_a_chat_template_replaces_that_of_the_model(chat_model: Path, demo_model: Path) -> None:
    for path in (chat_model, demo_model):
        vocab = Vocab.from_blob(extract_vocab(path, TEMPLATE))
        assert vocab.chat_template == TEMPLATE
        assert vocab.n_tokens == Vocab.from_blob(extract_vocab(path)).n_tokens
    engine = Engine(Model(chat_model, CPU), OPTIONS, chat_template=TEMPLATE)
    assert engine.vocab.chat_template == TEMPLATE
    engine.close()
