"""Writes GGUF files with random weights: a small model for each memory kind of llama.cpp, or any given shape.

    from llamaq.tools.random_gguf import RECURRENT, write_model

    path = write_model(tmp_path / "recurrent.gguf", RECURRENT, seed=1)
    path = write_model(tmp_path / "long.gguf", dataclasses.replace(PLAIN, n_ctx=32_768, chat_template=CHATML))

`PLAIN`, `GROUPED`, `EXPERTS`, `SLIDING`, `RECURRENT` and `HYBRID` (all in `MEMORY_KINDS`) are files of a few hundred
KB, which are written within milliseconds. Their text has no meaning, but each token depends on every token of the
context, as in a trained model. So if a decode step reads the memory of another sequence, the generated tokens change.
The models never generate an end token, except after an end token. `random_gguf.tensors` explains how this is achieved.
"""

from llamaq.tools.random_gguf.model_spec import (
    CHATML,
    EXPERTS,
    GROUPED,
    HYBRID,
    MEMORY_KINDS,
    PLAIN,
    RECURRENT,
    SLIDING,
    Architecture,
    ModelSpec,
    Weights,
)
from llamaq.tools.random_gguf.vocabulary import BOS, EOS, TURN_END, TURN_START, Vocabulary, byte_level_vocabulary
from llamaq.tools.random_gguf.writer import REVISION, write_model

__all__ = [
    "BOS",
    "CHATML",
    "EOS",
    "EXPERTS",
    "GROUPED",
    "HYBRID",
    "MEMORY_KINDS",
    "PLAIN",
    "RECURRENT",
    "REVISION",
    "SLIDING",
    "TURN_END",
    "TURN_START",
    "Architecture",
    "ModelSpec",
    "Vocabulary",
    "Weights",
    "byte_level_vocabulary",
    "write_model",
]
