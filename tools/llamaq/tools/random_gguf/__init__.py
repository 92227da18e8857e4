"""GGUF files with random weights: a small one for each memory kind of llama.cpp, or the shape of a named model.

    from llamaq.tools.random_gguf import RECURRENT, write_model

    path = write_model(tmp_path / "recurrent.gguf", RECURRENT, seed=1)
    path = write_model(tmp_path / "long.gguf", dataclasses.replace(PLAIN, n_ctx=32_768, chat_template=CHATML))

`PLAIN`, `GROUPED`, `SLIDING`, `RECURRENT` and `HYBRID` (all in `MEMORY_KINDS`) are a few hundred KB each and take some
milliseconds to write. They talk gibberish, but depend on every token of their context as a trained model does, so that
memory mixed up between two sequences changes what they say. They never generate an end token unless the last token was
one. `random_gguf.tensors` says how; the tests beside it hold it.
"""

from llamaq.tools.random_gguf.model_spec import (
    CHATML,
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
